"""The fake commands of SLURM for tests of facts about a cluster."""

from tests.submit.conftest import fake_slurm as fake_slurm
