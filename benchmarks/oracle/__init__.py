"""Scores of the oracle: published runs and our own, predicted before the comparison."""
