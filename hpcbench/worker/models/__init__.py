"""Single-device models, each built as a sequence of blocks."""
