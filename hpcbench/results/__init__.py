"""The results tree: what a result is, where it lies, how it is read back."""
