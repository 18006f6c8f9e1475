"""Tests that start several rank processes."""
