"""How right the oracle is: predictions that were written down before, against what was measured after."""
