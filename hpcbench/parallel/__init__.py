"""Arithmetic that the oracle and the worker share: strategy registry, rank mesh, layer tables, schedules and splits,
without torch.
"""
