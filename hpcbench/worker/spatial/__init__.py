"""Layers whose feature maps are cut along their spatial dims."""
