"""The experiments of the two papers, rerun on the SLURM box and reported."""
