"""An sbatch ends with the submit that called it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CALLER = """
import os, sys
from pathlib import Path
from hpcbench.submit import sbatch
if sys.argv[2] == "by itself":
    sbatch._parent_death_command = lambda: ()
sbatch.SbatchExecutor(Path(sys.argv[1]), os.environ).submit_script(Path("job.sh"), [], 0)
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("how", ["by a command", "by itself"])
def test_sbatch_ends_with_the_submit_that_called_it(how: str, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\necho $$ > {pid_file}.new\nmv {pid_file}.new {pid_file}\nexec sleep 100\n")
    sbatch.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    caller = subprocess.Popen([sys.executable, "-c", CALLER, str(tmp_path), how], env=environment)
    give_up = time.monotonic() + 60
    while not pid_file.exists() and time.monotonic() < give_up:
        time.sleep(0.05)
    pid = int(pid_file.read_text())
    assert is_alive(pid)
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    while is_alive(pid) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert not is_alive(pid)
