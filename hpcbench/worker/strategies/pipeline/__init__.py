"""Pipeline parallelism: the schedules of ``parallel`` executed by one point-to-point runtime."""
