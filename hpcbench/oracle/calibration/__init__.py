"""A cluster's numbers, measured: what is run for them, how they are fitted, where they are kept."""
