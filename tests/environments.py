"""Environments with another torch than ``.venv``'s: in ``~/.cache/hpcbench``, made once and kept between checkouts.

hpcbench itself is taken from the tree, so that what an environment holds depends on its requirements alone.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

_READY = "hpcbench-ready.txt"


class EnvironmentMissing(Exception):
    """The environment cannot be made here; the message names the command that mends it."""


def cached_folder(name: str) -> Path:
    """Return the folder of the environment ``name``, whether it is there or not."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "hpcbench" / name


def make_cached_environment(
    folder: Path,
    python: str,
    pip_arguments: Sequence[str],
    base: str,
    changeable: Sequence[str],
    announcement: str,
    run: Callable[[Sequence[str]], None],
    links: Sequence[Path] = (),
) -> None:
    """Make a virtual environment in ``folder``, unless it is there already.

    Args:
        folder: See ``cached_folder``.
        python: The interpreter that the environment is made of.
        pip_arguments: Arguments of ``pip install``.
        base: What the contents depend on; where it has changed, the environment is made anew.
        changeable: Requirements among the arguments; where only they have changed, pip changes the environment in place.
        announcement: What is printed before an installation.
        run: Runs a command, and raises ``EnvironmentMissing`` if it fails.
        links: Installed packages that the environment shares, from a checkout that may be gone at the next call.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ready, state = folder / _READY, "\n".join((base, *changeable))
        known = ready.read_text() if ready.is_file() else ""
        if known == state:
            _link(folder, links)
            return
        print(announcement, flush=True)
        if not known.startswith(base):
            run([python, "-m", "venv", "--clear", str(folder)])
        _link(folder, links)
        ready.unlink(missing_ok=True)
        run([str(folder / "bin/python"), "-m", "pip", "install", "--quiet", *pip_arguments])
        ready.write_text(state)


def _link(folder: Path, packages: Sequence[Path]) -> None:
    (shared,) = folder.glob("lib/python*/site-packages")
    for package in packages:
        link = shared / package.name
        if not (link.is_symlink() and link.readlink() == package):
            link.unlink(missing_ok=True)
            link.symlink_to(package)


def run_or_refuse(command: Sequence[str], what: str) -> None:
    """Run ``command``, which installs ``what``.

    Raises:
        EnvironmentMissing: It failed.
    """
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise EnvironmentMissing(
            f"the environment of {what} cannot be installed: {done.stdout.strip()[-600:]}\n"
            f"it needs a package index with that torch: {' '.join(command)}"
        )


def make_trainer_environment(name: str, requirements: Sequence[str]) -> Path:
    """Return the interpreter of a cached environment with ``requirements`` and the torch of this one.

    Raises:
        EnvironmentMissing: pip cannot install them.
    """
    torch = Path(importlib.util.find_spec("torch").origin).parent  # type: ignore[union-attr, arg-type]
    version = importlib.metadata.version("torch")
    links = [torch, torch.parent / "torchgen", torch.parent / "functorch", *torch.parent.glob("torch-*.dist-info")]
    folder = cached_folder(f"trainer-{name}")
    base = "\n".join([sys.version, version, *requirements])
    make_cached_environment(
        folder, sys.executable, requirements, base, [], f"installing {' '.join(requirements)} in {folder}",
        lambda command: run_or_refuse(command, name), [link for link in links if link.exists()],
    )  # fmt: skip
    return folder / "bin" / "python"
