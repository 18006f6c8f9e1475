"""What a replica is fed with."""
