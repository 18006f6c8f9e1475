"""A sweep that is packed, carried away and read elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcbench.config.run_spec import RunSpec, RunTask, TaskFileHeader, config_id, encode_task_file, run_id
from hpcbench.results.attempts import begin_attempt
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import FailureRecord, RankResult, RunMetrics, RunResult
from hpcbench.submit.journal import JobBatch, JournalWriter

QUICK = """name = "quick"
[fixed]
model = "resnet18"
dataset = "digits"
batch_size = 4
warmup_steps = 1
steps = 2
[grid]
strategy = ["single", "ddp"]
tasks_per_node = [1, 2]
"""


def hpcbench(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpcbench", *arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=250,
        env={**os.environ, "HPCBENCH_RESULTS": str(cwd / "results")},
    )  # fmt: skip


def member_json(archive: tarfile.TarFile, name: str) -> Any:
    file = archive.extractfile(name)
    assert file is not None
    return json.load(file)


@pytest.mark.slow
def test_a_real_sweep_gives_the_same_table_elsewhere(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    (here / "quick.toml").write_text(QUICK)
    done = hpcbench("run", "quick.toml", cwd=here)
    assert done.returncode == 0, done.stderr
    table = json.loads(hpcbench("table", "quick", "--json", cwd=here).stdout)
    assert len(table["rows"]) == 3
    plain = hpcbench("bundle", "quick", cwd=here)
    assert (plain.returncode, "3 runs" in plain.stderr, plain.stdout) == (0, True, ""), plain.stderr
    with_logs = hpcbench("bundle", "quick.toml", "--logs", "--out", "logs.tgz", cwd=here)
    assert with_logs.returncode == 0, with_logs.stderr
    for name in ("quick.hpcbench.tar.gz", "logs.tgz"):
        shutil.move(here / name, there / name)
    shutil.rmtree(here)
    for name in ("quick.hpcbench.tar.gz", "logs.tgz"):
        moved = json.loads(hpcbench("table", name, "--json", cwd=there).stdout)
        assert moved == table
        assert f"{name} on local" in hpcbench("table", name, cwd=there).stdout
    twice = hpcbench("collect", "logs.tgz", "quick.hpcbench.tar.gz", "--cluster", "local", cwd=there)
    assert [result["status"] for result in json.loads(twice.stdout)["results"]] == ["ok"] * 3
    assert sorted(os.listdir(there)) == ["logs.tgz", "quick.hpcbench.tar.gz"]
    for name, logs in (("quick.hpcbench.tar.gz", False), ("logs.tgz", True)):
        with tarfile.open(there / name) as archive:
            kinds = {Path(one).name for one in archive.getnames()}
        assert {"quick.json", "result.json", "attempt.json", "rank-0.json", "0.sh", "0.jsonl"} <= kinds
        assert ("out.log" in kinds, "queue.log" in kinds) == (logs, logs)


SPEC = RunSpec(
    model="resnet18", dataset="digits", strategy="single", batch_size=8, env={"NCCL_TOPO_FILE": "/home/carol/t"}
)
ID = run_id(SPEC)


@pytest.fixture
def planted(tmp_path: Path) -> ClusterTree:
    """Every kind of file, each with the same text in it."""
    tree = ClusterTree(tmp_path / "results" / "c")
    everything = f"carol of prj4711 on gpunode[17-18] | {tree.root}"
    attempt = begin_attempt(
        tree.run_folder(ID), launch=everything, host="gpunode17", started_unix_s=1.0, tree=str(tree.root),
        task_file=f"{tree.root}/submissions/carol-0001/0.jsonl",
    )  # fmt: skip
    rank = RankResult(
        rank=0, local_rank=0, node_rank=0, host="gpunode17.hpc.example.org", pid=1, device="cpu", warnings=[everything],
        error=FailureRecord(type="T", message=everything, traceback_tail=everything),
        provenance={"job": {"account": "prj4711", "nodelist": "gpunode[17-18]"}, everything: everything},
    )  # fmt: skip
    attempt.write_rank(rank)
    (attempt.folder / "rank-1.json").write_text(f'{{"broken": "{everything}')
    for log in ("out.log", "err.log"):
        (attempt.folder / log).write_bytes(everything.encode() + b"\xff\n")
    result: dict[str, Any] = {
        "run_id": ID,
        "config_id": config_id(SPEC),
        "attempt": 1,
        "sweep": "carol",
        "cluster": "c",
    }
    tree.write_result(RunResult(
        **result, status="failed", spec=SPEC, metrics=RunMetrics(), error=FailureRecord(type="T", message=everything),
        ranks=[{"rank": number, "host": f"gpunode1{number}"} for number in (7, 8)], warnings=[everything],
        provenance=rank.provenance,
    ))  # fmt: skip
    submission = tree.submissions / "carol-0001"
    submission.mkdir(parents=True)
    script = f"#!/bin/bash\n#SBATCH --account=prj4711\n#SBATCH --nodelist=gpunode[17-18]\n# {everything}\n"
    (submission / "0.sh").write_text(script)
    header = TaskFileHeader(cluster="c", device="cpu", tree=str(tree.root), submission="carol-0001", host_suffix=everything,
                        model_folder=f"/proj/prj4711/{everything}")  # fmt: skip
    task = RunTask(run_id=ID, config_id=config_id(SPEC), sweep="carol", spec=SPEC, time_limit_s=1)
    (submission / "0.jsonl").write_bytes(encode_task_file(header, [task]) + everything.encode())
    (submission / "0.4711.4294967294.log").write_text(everything)
    array = {"number": 0, "run_ids": [ID], "ranks": 1, "nodes": 1, "job_limit_s": 1}
    record = {
        "submission": "carol-0001", "token": "t", "sweep": "carol", "cluster": "c", "scheduler": "slurm",
        "created_unix_s": 1, "arrays": [array], everything: everything,
    }  # fmt: skip
    writer = JournalWriter(submission)
    writer.record(JobBatch(array=0, first=0, count=1, name="hpcbench-carol-0001-t-0.0-0", job_id="4711"))
    writer.record_waiting(everything)
    (submission / "stop.jsonl").write_bytes(msgspec.json.encode({everything: everything}) + b"\n")
    (submission / "dropped.json").write_bytes(msgspec.json.encode([everything]))
    (submission / "submission.json").write_bytes(msgspec.json.encode(record))
    tree.sweep_path("carol").parent.mkdir()
    sweep = {
        "sweep": "carol",
        "cluster": "c",
        "description": everything,
        "run_ids": [ID],
        "dropped": 0,
        "written_unix_s": 1,
    }
    tree.sweep_path("carol").write_bytes(msgspec.json.encode(sweep))
    return tree


def test_a_bundle_holds_every_kind_of_file_as_it_is(planted: ClusterTree, tmp_path: Path) -> None:
    done = hpcbench("bundle", "carol", "--logs", "--out", "carol.tgz", cwd=tmp_path)
    assert (done.returncode, "1 run, 14 files" in done.stderr) == (0, True), done.stderr
    with tarfile.open(tmp_path / "carol.tgz") as archive:
        assert {(member.uid, member.gid, member.uname, member.gname, member.mtime) for member in archive} == {
            (0, 0, "", "", 0)
        }
        files = {member.name: archive.extractfile(member) for member in archive if member.name.startswith("c/")}
        contents = {name: file.read() for name, file in files.items() if file is not None}
    assert len(contents) == 14
    assert contents == {name: (planted.root.parent / name).read_bytes() for name in contents}
    (result,) = json.loads(hpcbench("collect", "carol.tgz", cwd=tmp_path).stdout)["results"]
    assert (result["run_id"], result["sweep"]) == (ID, "carol")


def test_a_link_in_the_tree_is_left_out_and_named(planted: ClusterTree, tmp_path: Path) -> None:
    rank = planted.run_folder(ID) / "attempts" / "1" / "rank-0.json"
    rank.unlink()
    rank.symlink_to("/etc/passwd")
    done = hpcbench("bundle", "carol", cwd=tmp_path)
    assert (done.returncode, "10 files" in done.stderr) == (0, True), done.stderr
    assert "rank-0.json is a link: none is followed inside a results tree" in done.stderr
    with tarfile.open(tmp_path / "carol.hpcbench.tar.gz") as archive:
        assert all(member.isreg() for member in archive)
        header = member_json(archive, "bundle.json")
    assert [Path(name).name for name in header["left_out"]] == ["rank-0.json"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["bundle", "carrol"], 2, "sweep 'carrol' has nothing in"),
        (["bundle", "carol", "--cluster", "d"], 2, "no results of cluster 'd'"),
        (["bundle", "carol", "--out", "x.zip"], 2, "unknown ending\n  choices: .tar.gz, .tgz"),
        (["bundle", "carol", "--out", "results/c/sweeps/carol.json/x.tgz"], 3, "cannot write"),
        (["table", "absent.tar.gz"], 2, "cannot read absent.tar.gz: No such file"),
        (["table", "broken.tgz"], 2, "broken.tgz is damaged, or no .tar.gz"),
    ],
)
def test_invalid_bundle_arguments_fail_and_write_no_file(
    planted: ClusterTree, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    (tmp_path / "broken.tgz").write_bytes(b"no archive")
    before = sorted(tmp_path.rglob("*"))
    done = hpcbench(*arguments, cwd=tmp_path)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert sorted(tmp_path.rglob("*")) == before
