"""Decisions and messages of Horovod's build, without building."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcbench.errors import WorkerError
from hpcbench.tools.build_horovod import build_variables, examine_target, find_nccl, main, wheel_folder

FACTS: dict[str, Any] = {
    "torch": "2.13.0+cpu", "python": "cpython-311", "machine": "x86_64", "libc": "glibc-2.36", "cxx": 20,
    "cuda_home": "", "nccl": "",
}  # fmt: skip


def test_another_environment_and_other_parts_are_another_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    others = ({"torch": "2.6.0+cpu"}, {"python": "cpython-312"}, {"machine": "aarch64"}, {"libc": "glibc-2.28"})
    found = {wheel_folder(FACTS | other, "", "") for other in ({}, *others)}
    found |= {wheel_folder(FACTS, *parts) for parts in (("1", ""), ("2", ""), ("", "/opt/nccl"))}
    assert len(found) == 8
    assert {folder.parent for folder in found} == {tmp_path / "hpcbench" / "wheels"}


def test_a_build_with_cuda_takes_torchs_toolkit_before_others_and_keeps_the_users_architectures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Horovod's cmake/build_utils.py asks the first nvcc of PATH for its architectures."""
    monkeypatch.setenv("PATH", "/usr/local/cuda-12/bin:/usr/bin")
    monkeypatch.setenv("HOROVOD_BUILD_CUDA_CC_LIST", "80,90")
    monkeypatch.setenv("HOROVOD_WITH_TENSORFLOW", "1")
    facts = FACTS | {"cuda_home": "/opt/cuda-13"}
    variables = build_variables(facts, "", "/nccl", tmp_path)
    assert variables["PATH"] == "/opt/cuda-13/bin:/usr/local/cuda-12/bin:/usr/bin"
    assert variables["HOROVOD_CUDA_HOME"] == variables["CUDA_PATH"] == "/opt/cuda-13"
    assert (variables["HOROVOD_NCCL_HOME"], variables["HOROVOD_NCCL_LINK"]) == ("/nccl", "SHARED")
    assert variables["HOROVOD_BUILD_CUDA_CC_LIST"] == "80,90"
    assert "HOROVOD_WITH_TENSORFLOW" not in variables
    without = build_variables(facts, "/opt/mpi/bin", "", tmp_path)
    assert "HOROVOD_GPU_OPERATIONS" not in without, "the patch looks for CUDA only then"
    assert (without["HOROVOD_WITH_MPI"], without["HOROVOD_MPI_BIN"]) == ("1", "/opt/mpi/bin")


def test_nccl_of_torch_s_package_gets_the_name_that_is_linked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("nccl/include/nccl.h", "nccl/lib/libnccl.so.2", "cuda/bin/nvcc"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME", "NCCL_ROOT", "EBROOTNCCL"):
        monkeypatch.delenv(name, raising=False)
    facts = FACTS | {"cuda_home": str(tmp_path / "cuda"), "nccl": str(tmp_path / "nccl")}
    assert find_nccl(FACTS) == ""
    assert find_nccl(facts) == str(tmp_path / "nccl")
    home = Path(build_variables(facts, "", find_nccl(facts), tmp_path / "build")["HOROVOD_NCCL_HOME"])
    assert (home / "lib" / "libnccl.so").resolve().name == "libnccl.so.2"
    assert (home / "include" / "nccl.h").exists()


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
    assert f"{python} -m pip install 'torch>=2.6'" in (caught.value.hint or "")


def test_a_machine_without_a_compiler_names_the_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "env").symlink_to(shutil.which("env") or "/usr/bin/env")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WorkerError, match=r"needs g\+\+, make, patch") as caught:
        examine_target(sys.executable)
    assert "apt-get install g++ make patch" in (caught.value.hint or "")
