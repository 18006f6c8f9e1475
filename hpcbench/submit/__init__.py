"""Submission of runs: the plan of a sweep, its job scripts and task files, the scheduler, and the state of
every run."""
