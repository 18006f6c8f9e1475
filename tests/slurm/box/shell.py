"""Running commands and waiting, always with a time limit and a reason."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence

from . import paths
from .errors import BoxError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def clean_env() -> dict[str, str]:
    """Environment of the box's own commands: the caller's SLURM_* and MYSQL_* must not steer them."""
    return {
        # Commands of another release than the machine's are in the first folder.
        "PATH": f"{paths.BIN}:{PATH}",
        "HOME": os.environ.get("HOME", "/root"),
        "LC_ALL": "C",
        "SLURM_CONF": str(paths.SLURM_CONF),
        # libmariadb reads the socket from here; slurmdbd.conf has no key for it.
        "MYSQL_UNIX_PORT": str(paths.DB_SOCKET),
    }


def run(argv: Sequence[str], timeout: float = 30, check: bool = True, stdin: str | None = None) -> tuple[int, str]:
    """Exit status and joined output of a command; with `check`, a failure is a BoxError that quotes the output."""
    try:
        done = subprocess.run(
            argv,
            env=clean_env(),
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError:
        raise BoxError(f"command {argv[0]!r} is not installed: install it, then try again") from None
    except subprocess.TimeoutExpired:
        if not check:
            return 124, f"no answer after {timeout:g} s"
        raise BoxError(f"no answer after {timeout:g} s from: {' '.join(argv)}") from None
    if check and done.returncode != 0:
        last = "\n  ".join(done.stdout.strip().splitlines()[-8:])
        raise BoxError(f"exit status {done.returncode} from: {' '.join(argv)}\n  {last}")
    return done.returncode, done.stdout


def succeeds(argv: Sequence[str], timeout: float = 10) -> bool:
    """Whether the command exits 0 in time; a missing command counts as no."""
    try:
        return run(argv, timeout=timeout, check=False)[0] == 0
    except BoxError:
        return False


def wait_for(what: str, ready: Callable[[], bool], timeout: float, hint: Callable[[], str] | None = None) -> None:
    """Poll until `ready`; past the limit, a BoxError says what was waited for, and the hint where to look."""
    end = time.monotonic() + timeout
    pause = 0.02
    while not ready():
        if time.monotonic() > end:
            raise BoxError(f"waited {timeout:g} s for {what}, in vain{': ' + hint() if hint else ''}")
        time.sleep(pause)
        pause = min(pause * 1.3, 0.3)
