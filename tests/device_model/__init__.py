"""A model of ranks with one GPU each, and an exhaustive search for states in which they wait for each other."""
