"""Layers whose channels are shared by the ranks of a group."""
