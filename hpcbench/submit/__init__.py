"""From a plan to jobs: submission folders, submitit executors, the state of runs."""
