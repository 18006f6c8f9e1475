"""How long a step takes, a family of strategies a module."""
