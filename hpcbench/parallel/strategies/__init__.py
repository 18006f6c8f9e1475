"""Registry entries, limits and splits of each family of strategies."""
