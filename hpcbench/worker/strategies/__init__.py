"""Runtimes: how a single-device model is trained on several ranks."""
