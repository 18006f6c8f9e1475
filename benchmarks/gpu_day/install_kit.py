"""Install a kit's wheels into a folder: ``python3 -m benchmarks.gpu_day.install_kit .whl FOLDER``.

The standard library is all it needs. A wheel for another Python is left out and named, so that a node that has the
package already goes on.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def is_for(wheel: Path, running: tuple[int, int]) -> bool:
    """Return whether ``wheel`` has code for Python ``running``, by its name."""
    python, abi = wheel.stem.split("-")[-3:-1]
    return abi == "none" or "abi3" in abi or f"cp{running[0]}{running[1]}" in python.split(".")


def kit_problems(wheels: Path | None, running: tuple[int, int] = sys.version_info[:2]) -> Iterator[str]:
    """Yield a sentence on each wheel that this Python cannot use."""
    for wheel in sorted(wheels.glob("*.whl")) if wheels is not None and wheels.is_dir() else []:
        if not is_for(wheel, running):
            version = f"{running[0]}.{running[1]}"
            yield f"the kit's {wheel.name} is not for Python {version}: make gpu-kit KIT_PYTHON={version}"


def main() -> int:
    """Install what fits; pip says what it refuses."""
    wheels, target = Path(sys.argv[1]), Path(sys.argv[2])
    for problem in kit_problems(wheels):
        print(f"PROBLEM: {problem}", file=sys.stderr)
    fitting = [str(wheel) for wheel in sorted(wheels.glob("*.whl")) if is_for(wheel, sys.version_info[:2])]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir"]
    done = subprocess.run(
        [*pip, "--disable-pip-version-check", "--upgrade", "--target", str(target), *fitting], check=False
    )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
