"""What the oracle is scored on: runs of others, and our own, predicted before anybody compared them."""
