"""Files that `recommend --out` writes, or does not write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_cli import hpcbench

DECODER = ("--model", "deepseek_v3", "--dataset", "tokens", "--cluster", "h100-80gb-ib")


@pytest.mark.parametrize(
    "words",
    [
        DECODER,
        (*DECODER, "--as", "megatron"),
        ("--model", "resnet50", "--dataset", "imagenet", "--cluster", "abci-v100", "--batch-size", "100000"),
    ],
    ids=["layouts", "a trainer's layouts", "strategies"],
)
@pytest.mark.parametrize("form", ["tables", "JSON"])
def test_no_sweep_is_written_where_nothing_can_run(tmp_path: Path, words: tuple[str, ...], form: str) -> None:
    options = ("--json",) if form == "JSON" else ()
    done = hpcbench("recommend", *words, "--out", "best.toml", *options, cwd=tmp_path)
    assert done.returncode == 1
    assert "best.toml was not written: nothing can run" in done.stderr
    assert not (tmp_path / "best.toml").exists()
    if form == "JSON":
        (entry,) = json.loads(done.stdout)["recommendations"]
        assert not entry["layouts" if "layouts" in entry else "candidates"]
    else:
        assert "left out" in done.stdout or "cannot run" in done.stdout


def test_a_sweep_in_an_absent_folder_is_refused_by_the_folder(tmp_path: Path) -> None:
    words = ("recommend", "--model", "llama_8b", *DECODER[2:], "--nodes", "1", "--out")
    done = hpcbench(*words, "a/b/best.toml", cwd=tmp_path)
    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        "error: cannot write a/b/best.toml: No such file or directory", "  the folder a/b does not exist",
    ]  # fmt: skip
    (tmp_path / "a" / "b").mkdir(parents=True)
    written = hpcbench(*words, "a/b/best.toml", cwd=tmp_path).stderr
    assert "written: a/b/best.toml; next: hpcbench plan a/b/best.toml --cluster h100-80gb-ib" in written
    hint = 'no job reaches h100-80gb-ib: to submit, write a profile of your site with extends = "h100-80gb-ib"'
    assert hint in written
    assert hint in hpcbench("plan", "a/b/best.toml", "--cluster", "h100-80gb-ib", cwd=tmp_path).stderr


def test_the_sweep_is_written_for_a_reader_that_leaves(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hpcbench", "recommend", "--model", "llama_8b", *DECODER[2:], "--out", "best.toml"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.close()
    assert (tmp_path / "best.toml").exists()
