"""Decisions and messages of Horovod's build, without building."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import tarfile
from pathlib import Path

import pytest

from hpcbench.errors import WorkerError
from hpcbench.tools.build_horovod import (
    HOROVOD_VERSION,
    BuildFeatures,
    BuildTarget,
    compile_error,
    cuda_build_variables,
    examine_target,
    find_cached_wheel,
    main,
    patch_source,
    source_edits,
    store_wheel,
    unpack_source,
    wheel_cache_folder,
    wheel_cache_key,
    wheel_local_version,
)

TARGET = BuildTarget(
    python="/opt/env/bin/python", torch="2.13.0+cpu", tag="cpython-311", machine="x86_64", libc="glibc-2.36",
    include="/usr/include/python3.11", cxx_standard=20, cuda_home=None, nccl_package=None,
)  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        {"torch": "2.6.0+cpu"},
        {"tag": "cpython-312"},
        {"machine": "aarch64"},
        {"libc": "glibc-2.28"},
    ],
)
def test_another_environment_is_another_wheel(other: dict[str, str]) -> None:
    changed = dataclasses.replace(TARGET, **other)  # type: ignore[arg-type]
    assert wheel_cache_key(changed, BuildFeatures()) != wheel_cache_key(TARGET, BuildFeatures())


def test_other_parts_are_another_wheel_and_another_path_is_not() -> None:
    found = {
        wheel_cache_key(TARGET, parts)
        for parts in (BuildFeatures(), BuildFeatures(mpi="1"), BuildFeatures(mpi="2"), BuildFeatures(nccl="/opt/nccl"))
    }
    assert len(found) == 4
    assert wheel_cache_key(
        dataclasses.replace(TARGET, python="/home/me/env/bin/python"), BuildFeatures()
    ) == wheel_cache_key(TARGET, BuildFeatures())


def test_the_wheels_version_lists_its_features() -> None:
    assert wheel_local_version(TARGET, BuildFeatures(mpi="0a")) == "patch1.torch2.13.0.cpu.gloo.mpi"


def test_a_wheel_is_kept_and_found(tmp_path: Path) -> None:
    wheel = tmp_path / f"horovod-{HOROVOD_VERSION}-cp311-cp311-linux_x86_64.whl"
    wheel.write_bytes(b"wheel")
    cache = tmp_path / "cache"
    assert find_cached_wheel(cache, TARGET, BuildFeatures()) is None
    kept = store_wheel(cache, wheel, wheel_cache_key(TARGET, BuildFeatures()))
    assert find_cached_wheel(cache, TARGET, BuildFeatures()) == kept
    assert find_cached_wheel(cache, TARGET, BuildFeatures(mpi="1")) is None
    assert [path.name for path in kept.parent.iterdir()] == [wheel.name], "nothing half-written stays"


def test_the_wheel_cache_follows_xdg_cache_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert wheel_cache_folder() == tmp_path / "hpcbench" / "wheels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert wheel_cache_folder() == Path("/home/me/.cache/hpcbench/wheels")


def test_a_build_with_cuda_takes_torchs_toolkit_before_others_and_keeps_the_users_architectures() -> None:
    """Horovod's cmake/build_utils.py asks the first nvcc of PATH for its architectures."""
    variables = cuda_build_variables("/opt/cuda-13", Path("/nccl"), {"PATH": "/usr/local/cuda-12/bin:/usr/bin"})
    assert variables["PATH"] == "/opt/cuda-13/bin:/usr/local/cuda-12/bin:/usr/bin"
    assert variables["HOROVOD_CUDA_HOME"] == variables["CUDA_PATH"] == "/opt/cuda-13"
    assert (variables["HOROVOD_NCCL_HOME"], variables["HOROVOD_NCCL_LINK"]) == ("/nccl", "SHARED")
    assert "HOROVOD_BUILD_CUDA_CC_LIST" not in variables
    restricted = cuda_build_variables("/opt/cuda-13", Path("/nccl"), {"HOROVOD_BUILD_CUDA_CC_LIST": "80,90"})
    assert restricted["HOROVOD_BUILD_CUDA_CC_LIST"] == "80,90"


SOURCE = {
    "CMakeLists.txt": 'set(CMAKE_CXX_STANDARD 14)\n            set(X "${X} -std=c++11")\n        endif()\n    find_package(MPI ${R})\n\nif(CMAKE_CUDA_COMPILER)\n',
    "horovod/torch/CMakeLists.txt": "x from distutils.sysconfig import get_python_inc; print(get_python_inc()) y\n"
    "if(NOT Pytorch_VERSION)\n    set(CMAKE_CXX_STANDARD 14)\nendif()\n",
    "horovod/runner/js_run.py": "from distutils.spawn import find_executable\n",
    "setup.py": "config = 'Debug' if x else 'RelWithDebInfo'\nrequire_list.append('cffi>=1.4.0')\nsetup_requires=a if b else [],\n",
}


def write_source(folder: Path) -> Path:
    for name, text in SOURCE.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_horovods_source_is_patched_for_the_requested_standard(tmp_path: Path) -> None:
    root = write_source(tmp_path)
    patch_source(root, 17, cuda=False)
    whole = "".join((root / name).read_text() for name in SOURCE)
    assert whole.count("set(CMAKE_CXX_STANDARD 17)") == 2
    assert "-std=c++17" in whole
    assert "if(FALSE)" in whole
    assert "setup_requires=[]," in whole
    for gone in ("STANDARD 14", "c++11", "distutils", "cffi", "RelWithDebInfo"):
        assert gone not in whole


def test_the_mpi_that_was_tried_is_the_one_that_is_taken(tmp_path: Path) -> None:
    patch_source(write_source(tmp_path), 20, cuda=False, mpicxx="/opt/mpi/bin/mpicxx")
    text = (tmp_path / "CMakeLists.txt").read_text()
    assert 'set(MPI_CXX_COMPILER "/opt/mpi/bin/mpicxx" CACHE FILEPATH "" FORCE)' in text
    assert 'set(MPI_C_COMPILER "/opt/mpi/bin/mpicc" CACHE FILEPATH "" FORCE)\n    find_package(MPI ${R})' in text


def test_with_cuda_its_compiler_stays(tmp_path: Path) -> None:
    patch_source(write_source(tmp_path), 20, cuda=True)
    assert "if(CMAKE_CUDA_COMPILER)" in (tmp_path / "CMakeLists.txt").read_text()


@pytest.mark.parametrize("number", range(len(source_edits(20, cuda=False))))
def test_an_edit_without_a_match_is_refused(tmp_path: Path, number: int) -> None:
    """Every edit is missed where it finds nothing: a silent one would give a build that fails much later."""
    root = write_source(tmp_path)
    for name in {edit.file for edit in source_edits(20, cuda=False)[number:]}:
        (root / name).write_text("other\n")
    with pytest.raises(WorkerError, match=r"is not there: is this Horovod"):
        patch_source(root, 20, cuda=False)


def test_another_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with tarfile.open(tmp_path / "other.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "other", "other")
    with pytest.raises(WorkerError, match="not the source package of Horovod"):
        unpack_source(tmp_path / "other.tar.gz", tmp_path / "unpacked")


# What is missing


def test_the_horovod_build_names_a_missing_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--python", "/nowhere/python"]) == 1
    assert "/nowhere/python: No such file or directory" in capsys.readouterr().err


def test_an_interpreter_without_torch_gets_the_install_command(tmp_path: Path) -> None:
    # -S leaves out what is installed, torch included.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    with pytest.raises(WorkerError, match="cannot import torch") as caught:
        examine_target(str(python))
    assert caught.value.hint == f"{python} -m pip install 'torch>=2.6'"


def test_a_machine_without_a_compiler_names_the_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "env").symlink_to(shutil.which("env") or "/usr/bin/env")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WorkerError, match=r"needs g\+\+, make") as caught:
        examine_target(sys.executable)
    assert "apt-get install g++ make" in (caught.value.hint or "")


def test_a_failed_compiler_is_quoted() -> None:
    assert "No such file" in compile_error(["/nowhere/g++"], "")
