"""The environment of ``make test-cuda``: what it says where something is missing, and that other runs leave it out."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import absent
from tests.cuda import environment, stub, stub_answers
from tests.cuda.__main__ import main
from tests.cuda.environment import cuda_package, environment_folder, torch_version
from tests.cuda.stub import Library, StubError, build_stub, read_prototypes
from tests.environments import EnvironmentMissing

HEADER = "typedef int cudaError_t;\nextern cudaError_t cudaGetDevice(int *device);\nextern cudaError_t\n  cudaFree(void *p);\n"


@pytest.mark.parametrize(
    ("required", "arguments", "answer", "words"),
    [
        ("", ["pytest", "tests/cuda"], 2, "tests/cuda: failed:"),
        ("slurm,cuda-stub", ["pytest", "tests/cuda"], 2, "tests/cuda: cuda-stub is required by HPCBENCH_REQUIRE, but"),
        ("slurm", ["--ranks", "8"], 2, "tests/cuda: failed:"),
    ],
)
def test_without_a_compiler_the_command_that_installs_one_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], required: str, arguments: list[str],
    answer: int, words: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("HPCBENCH_REQUIRE", required)
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.delenv(environment.STUB_FOLDER, raising=False)
    assert main(arguments) == answer
    message = capsys.readouterr().err
    assert message.startswith(words)
    assert "apt-get install gcc" in message


def refuse(command: Sequence[str]) -> None:
    raise EnvironmentMissing(" ".join(command))


def test_a_failed_installation_names_its_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("torch==1.2.3\n")
    monkeypatch.setattr(environment, "CONSTRAINTS", constraints)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(environment.STUB_FOLDER, raising=False)
    monkeypatch.setattr(environment, "_run", refuse)
    assert environment_folder() == tmp_path / "hpcbench" / "cuda-env-1.2.3"
    assert main([]) == 2
    assert "-m venv" in capsys.readouterr().err


def test_a_build_without_cuda_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissing, match=f"no CUDA build of torch {torch_version()}.*remove {tmp_path}"):
        cuda_package(tmp_path)


def test_a_package_without_headers_is_named(tmp_path: Path) -> None:
    with pytest.raises(StubError, match=r"has no .*libcudart\.so\.13: remove"):
        build_stub(tmp_path, tmp_path)


def test_an_answer_for_an_absent_function_is_named() -> None:
    library = Library("lib.so", "h.h", ("cudaFree",), {"cudaGetDevice": "*device = 1;"}, "")
    with pytest.raises(StubError, match="has no cudaGetDevice: mend tests/cuda/stub_answers.py"):
        stub.answering_source(library, {})


def test_prototypes_are_those_of_the_header(tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        absent("cuda-stub", "gcc is missing: apt-get install gcc libc6-dev")
    (tmp_path / "h.h").write_text(HEADER)
    prototypes = read_prototypes("gcc", tmp_path, "h.h")
    assert prototypes == {
        "cudaGetDevice": stub_answers.Prototype("cudaError_t", "int *device"),
        "cudaFree": stub_answers.Prototype("cudaError_t", "void *p"),
    }
    library = Library(
        "lib.so", "h.h", tuple(prototypes), {"cudaGetDevice": stub_answers.RUNTIME_ANSWERS["cudaGetDevice"]}, ""
    )
    assert "cudaError_t cudaGetDevice(int *device) {" in stub.answering_source(library, prototypes)
    assert "long cudaFree(void)" in stub.silent_source(library)


def test_other_runs_do_not_collect_the_folder() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", "tests/cuda"],
        cwd=environment.ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "no tests collected" in done.stdout
