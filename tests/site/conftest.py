"""The fake commands of SLURM for tests of facts about a cluster."""

from tests.submit.conftest import fake_slurm

__all__ = ["fake_slurm"]
