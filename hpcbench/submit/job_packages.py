"""A look for torch in the interpreter of the jobs before any of them is submitted."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.errors import INSTALL_WORKER, SubmitError
from hpcbench.render.job_script import rank_python
from hpcbench.submit.scheduler_settings import scrubbed_environment

_SYSTEM_FOLDERS = ("/usr/", "/bin/")
_LOOK_TIMEOUT_S = 60.0
_ABSENT = 3
_LOOK = f"import importlib.util, sys; sys.exit({_ABSENT} if importlib.util.find_spec('torch') is None else 0)"


def check_job_packages(profile: ClusterProfile, environments: Iterable[str | None]) -> None:
    """Check that the jobs' interpreters have torch, as far as this machine can see them.

    Raises ``SubmitError`` with the command that installs it: without torch, every run would end as ``unsupported``.
    """
    for python in dict.fromkeys(_visible_python(profile, name) for name in environments):
        if python is not None and not _has_torch(python):
            raise SubmitError(
                f"the jobs' interpreter {python} has no torch: nothing is submitted",
                hint=f"{python} -m {INSTALL_WORKER}",
            )


def _visible_python(profile: ClusterProfile, name: str | None) -> str | None:
    """The interpreter of an environment; ``None`` where only a job can tell what it has."""
    environment = profile.environment(name)
    is_made_in_job = environment.modules or environment.container or environment.setup or profile.setup
    if is_made_in_job or "PYTHONPATH" in profile.variables(name):
        return None
    python = rank_python(environment)
    # The system's interpreter of a login node is not the nodes'.
    is_elsewhere = profile.scheduler.kind != "local" and python.startswith(_SYSTEM_FOLDERS)
    return None if is_elsewhere or not Path(python).is_file() else python


def _has_torch(python: str) -> bool:
    if python == sys.executable:
        return importlib.util.find_spec("torch") is not None
    try:
        done = subprocess.run(
            [python, "-c", _LOOK],
            env=scrubbed_environment(), capture_output=True, timeout=_LOOK_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return True
    return done.returncode != _ABSENT
