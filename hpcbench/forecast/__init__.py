"""Predictions of the oracle for runs, plans, recommendations and calibrations of a cluster."""
