"""What a live scheduler says of its cluster: read, written down as a profile, compared with one."""
