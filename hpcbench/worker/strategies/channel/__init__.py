"""Filter and channel parallelism (Dryden et al. 2019)."""
