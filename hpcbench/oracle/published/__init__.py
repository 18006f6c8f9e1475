"""Models of time and memory as their authors published them, beside which ours is scored."""
