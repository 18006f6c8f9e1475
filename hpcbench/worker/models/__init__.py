"""Single-device models, each with a sequential view of its blocks."""
