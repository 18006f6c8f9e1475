"""Instruments around the steps: clocks, profiler, layer trace, traffic recorder, counters of host and GPU,
provenance.
"""
