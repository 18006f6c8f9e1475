"""What the oracle is scored on: its predictions, made before anybody compared them."""
