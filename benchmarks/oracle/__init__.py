"""What the oracle is scored on: runs that others published, and predictions made before anybody compared them."""
