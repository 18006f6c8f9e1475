"""Comparison of a run's training with its reference training."""
