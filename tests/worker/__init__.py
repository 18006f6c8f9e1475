"""Tests of what runs inside a job."""
