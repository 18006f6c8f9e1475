"""Findings about results (fastest strategy, crossovers, efficiency, memory, failures) with certainty and evidence."""
