"""Predictions of step time, traffic and memory for a run, from numbers only: no torch is needed."""
