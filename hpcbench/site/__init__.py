"""Cluster profiles against real clusters: written from a live scheduler, checked against it, and examined by a job on
a node.
"""
