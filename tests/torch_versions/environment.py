"""An environment with a given release of torch, its torchvision and hpcbench's dependencies.

With the oldest torch that ``pyproject.toml`` allows, every other dependency is the oldest one, too: that environment
shows whether the bounds are true.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import tomli

from tests.environments import EnvironmentMissing, cached_folder, make_cached_environment, run_or_refuse

ROOT = Path(__file__).resolve().parents[2]
_EXTRAS = ("worker", "fairscale", "report")
_BOUND = re.compile(r"(?P<name>[A-Za-z0-9_-]+)(?P<relation>>=|==)(?P<version>[0-9.]+)")


class TorchEnvironment(NamedTuple):
    """An environment of Python and torch, installed."""

    python: Path
    """Its interpreter."""
    torch: str
    """Version of torch, such as ``2.11.0``."""
    is_lowest: bool
    """Whether each package has the lowest version that ``pyproject.toml`` allows."""


def declared_bounds() -> dict[str, str]:
    """Return the lowest allowed version of every dependency and of the extras' by name."""
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in _EXTRAS)]
    found = {}
    for requirement in (each for one in lists for each in one):
        bound = _BOUND.fullmatch(requirement)
        assert bound is not None, f"pyproject.toml: {requirement} is neither name>=version nor name==version"
        found[bound["name"]] = bound["version"]
    return found


def torchvision_of(torch: str) -> str:
    """Return the release of torchvision that was made with a release of torch.

    Example:
        >>> torchvision_of("2.6.0"), torchvision_of("2.14.1")
        ('0.21.0', '0.29.1')
    """
    _, minor, patch = torch.split(".")
    return f"0.{int(minor) + 15}.{patch}"


def is_lowest(torch: str) -> bool:
    """Return whether ``pyproject.toml`` allows no older release of torch."""
    return torch.rpartition(".")[0] == declared_bounds()["torch"]


def requirements(torch: str) -> list[str]:
    """Return what pip is to install beside torch ``torch``."""
    bounds = declared_bounds()
    exact = {"torch": torch, "torchvision": torchvision_of(torch), "fairscale": bounds["fairscale"]}
    if is_lowest(torch):
        exact = {**bounds, **exact}
    return [f"{name}=={exact[name]}" if name in exact else f"{name}>={low}" for name, low in bounds.items()]


def make_torch_environment(torch: str, python: str) -> TorchEnvironment:
    """Return the environment of a release of torch, installed unless it is there.

    Args:
        torch: The release, such as ``2.11.0``.
        python: The interpreter it is made of, as a command or a path.

    Raises:
        EnvironmentMissing: There is no such release of torch for that Python, or no such Python.
    """
    if not re.fullmatch(r"2\.\d+\.\d+", torch):
        raise EnvironmentMissing(f"VERSION is a release of torch such as 2.11.0, not {torch!r}")
    script = "import sys; print('%d%d' % sys.version_info[:2]); print(sys.version)"
    try:
        asked = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise EnvironmentMissing(f"PYTHON={python} does not run: {error}") from error
    minor, _, version = asked.stdout.partition("\n")
    wanted = requirements(torch)
    folder = cached_folder(f"torch-env-{torch}-py{minor}")
    make_cached_environment(
        folder,
        python,
        wanted,
        version,
        wanted,
        f"installing torch {torch} for Python {minor[0]}.{minor[1:]} into {folder} (about 5 GB)",
        lambda command: run_or_refuse(command, "make test-torch"),
    )
    return TorchEnvironment(folder / "bin" / "python", torch, is_lowest(torch))
