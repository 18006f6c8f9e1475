"""The kit of a node without a network: wheels for its Python, hpcbench's own among them (``make gpu-kit``).

The node has torch, numpy and what torch needs. The kit has the rest of hpcbench's packages without polars, whose wheel
alone is larger than the limit: the day needs none of it, and tables are made elsewhere. Predictions travel in the tree.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from benchmarks.gpu_day.machines import LARGE_MEMORY, NODES
from benchmarks.gpu_day.parts import day_parts
from benchmarks.gpu_day.predictions import FILE, read_predictions
from benchmarks.gpu_day.shards import shard_specs
from hpcbench.config.run_spec import config_id
from hpcbench.strategies.resolve import InfeasiblePoint, PartitionLimits, resolve_point

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "annotated-types", "click", "cloudpickle", "jinja2", "markdown-it-py", "markupsafe", "mdurl", "msgspec",
    "nvidia-ml-py", "psutil", "pydantic", "pygments", "rich", "submitit", "tomli", "typing-extensions",
    "typing-inspection",
)  # fmt: skip
FAIRSCALE = "fairscale==0.4.13"
MAX_KIT_BYTES = 30 * 2**20
MAX_TREE_BYTES = 12 * 2**20
_PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)


def make_kit(folder: Path, python: str) -> int:
    """Fill ``folder`` with wheels for ``python`` (``3.12``); return 0, or 1 if the kit or the tree is too large."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    target = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    target += [word for platform in _PLATFORMS for word in ("--platform", platform)]
    core = _core_version(python)
    _pip("download", "--no-deps", "--dest", str(folder), *target, *PACKAGES, f"pydantic-core=={core}")
    with tempfile.TemporaryDirectory() as scratch:
        # Its build imports torch, which this environment has and an isolated one would download.
        _pip(
            "wheel", "--no-deps", "--no-build-isolation", "--no-binary", "fairscale", "--wheel-dir", scratch, FAIRSCALE
        )
        _pip("wheel", "--no-deps", "--wheel-dir", scratch, str(ROOT))
        for wheel in Path(scratch).glob("*.whl"):
            shutil.copy(wheel, folder)
    kit_bytes = sum(path.stat().st_size for path in folder.iterdir())
    tree_bytes = tracked_bytes()
    missing = missing_predictions()
    print(f"{len(list(folder.iterdir()))} wheels for Python {python}: {kit_bytes / 2**20:.1f} MiB in {folder}")
    print(f"tracked files of the tree: {tree_bytes / 2**20:.1f} MiB")
    for name in missing:
        print(f"{FILE.name} has no prediction of {name}: python -m benchmarks.gpu_day predict, and commit it")
    for what, size, limit in (("kit", kit_bytes, MAX_KIT_BYTES), ("tree", tree_bytes, MAX_TREE_BYTES)):
        if size > limit:
            print(f"the {what} has {size / 2**20:.1f} MiB, at most {limit / 2**20:.0f} may travel")
    print("there: make gpu-day OUT=FOLDER, or HPCBENCH_GPU_DAY=cpu make gpu-day to rehearse it")
    return int(kit_bytes > MAX_KIT_BYTES or tree_bytes > MAX_TREE_BYTES or bool(missing))


def tracked_bytes() -> int:
    """Return the bytes of the files that git tracks."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    return sum((ROOT / name.decode()).stat().st_size for name in names if name and (ROOT / name.decode()).is_file())


def missing_predictions() -> list[str]:
    """Return the configurations of the day that the committed file does not predict."""
    known, missing = read_predictions(), []
    for key in NODES:
        parts = day_parts("full", large_memory=key in LARGE_MEMORY)
        (singles,) = (part for part in parts if part.name == "singles")
        specs = [spec for spec, _ in shard_specs("full")]
        for point in singles.points:
            spec = resolve_point({**singles.fixed, **point}, PartitionLimits("day"))
            assert not isinstance(spec, InfeasiblePoint), spec
            specs.append(spec)
        missing += [f"{spec.model} on {key}" for spec in specs if config_id(spec) not in known.get(key, {})]
    return missing


def _core_version(python: str) -> str:
    """Return the version of pydantic-core that the newest pydantic asks for."""
    with tempfile.TemporaryDirectory() as scratch:
        target = ["--only-binary=:all:", "--python-version", python]
        _pip("download", "--no-deps", "--dest", scratch, *target, "pydantic")
        (wheel,) = Path(scratch).glob("pydantic-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            listing = archive.read(name).decode()
    line = next(line for line in listing.splitlines() if line.startswith("Requires-Dist: pydantic-core=="))
    return line.partition("==")[2].split(";")[0].strip()


def _pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", words[0], "-q", "--disable-pip-version-check", *words[1:]], check=True)
