"""Measurements against floors and peers. Ratios from alternating runs; nothing here is a test."""
