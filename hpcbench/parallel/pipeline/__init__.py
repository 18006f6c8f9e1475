"""Pipeline schedules, their simulation, and the division of a model into stages."""
