"""Runs of a user's own command instead of a training of hpcbench."""
