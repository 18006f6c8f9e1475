"""Predictions: what a strategy communicates and holds, and how long it takes. Numbers only, no torch."""
