"""What the ranks that share transformer blocks compute and pass to each other."""
