"""What the oracle says of runs that others published, before anybody compared it."""
