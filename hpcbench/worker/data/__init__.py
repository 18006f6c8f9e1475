"""Training samples: synthetic, resident on the device, or read from files."""
