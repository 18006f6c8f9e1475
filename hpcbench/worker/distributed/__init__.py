"""Ranks, rendezvous, process groups and the messages between ranks."""
