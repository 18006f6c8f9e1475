"""A tree that somebody else has written into: no command crashes on it or hands its escape codes to the terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcbench.config.run_spec import RunSpec, config_id, run_id, spec_document
from hpcbench.results.attempts import begin_attempt
from hpcbench.results.results_tree import ClusterTree

ROOT = Path(__file__).resolve().parents[2]
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202edlrow\u2066 $(touch X) `touch X` {{ 7*7 }} [red]"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")
SPEC = RunSpec(model="resnet18", dataset="digits", strategy="single", batch_size=8)
ID = run_id(SPEC)


def hpcbench(tree: ClusterTree, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpcbench", *arguments], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "HPCBENCH_RESULTS": str(tree.root.parent)}, timeout=120,
    )  # fmt: skip


def write_sweep(tree: ClusterTree, **changes: Any) -> None:
    record = {"sweep": "s", "cluster": "local", "description": "", "run_ids": [ID], "dropped": 0, "written_unix_s": 0}
    path = tree.sweep_path("s")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**record, **changes}))


@pytest.fixture
def tree(tmp_path: Path) -> ClusterTree:
    tree = ClusterTree(tmp_path / "results" / "local")
    write_sweep(tree)
    return tree


def write(tree: ClusterTree, data: bytes | dict[str, Any]) -> None:
    path = tree.result_path(ID)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(json.dumps(data).encode() if isinstance(data, dict) else data)


def document(**changes: Any) -> dict[str, Any]:
    base = {"run_id": ID, "config_id": config_id(SPEC), "attempt": 1, "sweep": "s", "cluster": "local", "status": "ok"}
    return {**base, "spec": spec_document(SPEC), "metrics": {"samples_per_s": 1.5}, **changes}


SPREAD = dict.fromkeys(("median", "mean", "std", "p10", "p90", "min", "max", "ci95_low", "ci95_high"), 1e308)

BROKEN: dict[str, Any] = {
    "nothing": b"",
    "half": b'{"run_id": "',
    "nested": b'{"unknown": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "not a number": json.dumps(document(metrics={"samples_per_s": float("nan")})).encode(),
    "no text": b'{"run_id": "\xff\xfe"}',
    "a list": b"[1, 2]",
    "wrong types": document(spec="x"),
    "of another run": document(run_id="0" * 16),
    "unknown status": document(status=EVIL),
    "a float without end": json.dumps(document()).replace("1.5", "1e999").encode(),
    "an integer without end": document(metrics={"peak_memory_bytes": 10**400}),
    "nodes without end": document(spec={**spec_document(SPEC), "nodes": 10**400}),
    "64 MiB": b" " * (64 * 2**20 + 1),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_result_is_a_row_and_a_state_with_the_reason(tree: ClusterTree, data: bytes | dict[str, Any]) -> None:
    write(tree, data)
    table = hpcbench(tree, "table", "s", "--json")
    (row,) = json.loads(table.stdout)["rows"]
    assert (row["status"], row["run_ids"], table.returncode) == ("broken", [ID], 0)
    assert row["reason"]
    status = hpcbench(tree, "status", "s")
    assert status.returncode == 1
    assert "lost" in status.stdout
    for done in (table, status, hpcbench(tree, "collect", "s")):
        assert "Traceback" not in done.stderr
        assert CONTROL.findall(done.stdout + done.stderr) == []


STRANGE: dict[str, dict[str, Any]] = {
    "codes everywhere": document(
        status="failed", sweep=EVIL, cluster=EVIL, config_id=EVIL, environment_digest=EVIL, warnings=[EVIL],
        error={"type": EVIL, "message": EVIL, "hint": EVIL, "traceback_tail": EVIL}, provenance={EVIL: EVIL},
        ranks=[{EVIL: EVIL}], spec={**spec_document(SPEC), "model": EVIL, "strategy": EVIL, "env": {"A": EVIL}},
    ),
    "huge numbers": document(metrics={
        "step_time_s": SPREAD, "samples_per_s": 1e308, "peak_memory_bytes": 2**63 - 1,
        "loss": {"first": -1e308, "last": 1e-320},
    }),
    "negative numbers": document(metrics={
        "step_time_s": dict.fromkeys(SPREAD, -1.0), "samples_per_s": -1.0, "peak_memory_bytes": -1,
    }),
    "a long reason": document(status="failed", error={"type": "T", "message": "x" * 10_000_000}),
    "integers without end elsewhere": document(provenance={"x": 10**300}, ranks=[{"rank": 10**300}]),
}  # fmt: skip


@pytest.mark.parametrize("data", STRANGE.values(), ids=STRANGE.keys())
def test_strange_results_are_shown_without_their_codes(tree: ClusterTree, data: dict[str, Any], tmp_path: Path) -> None:
    write(tree, data)
    files = [hpcbench(tree, "collect", "--out", str(tmp_path / f"x.{ending}")) for ending in ("csv", "parquet", "json")]
    status = hpcbench(tree, "status")
    assert status.returncode == (1 if data["status"] == "failed" else 0)
    asked = (["table", "s"], ["table", "--json"], ["report", "s"], ["validate"])
    tables = [hpcbench(tree, *options) for options in asked]
    for done in (status, *tables, *files):
        assert done.returncode == 0 or done is status, done.stderr
        assert "Traceback" not in done.stderr
        assert CONTROL.findall(done.stdout + done.stderr) == []
    assert len(hpcbench(tree, "table").stdout) < 20_000
    assert json.loads(hpcbench(tree, "collect").stdout)["results"][0]["spec"] | {"spec_version": 1} == data["spec"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Input data was truncated"),
        (b"[" * 100_000, "Expected `object`, got `array`"),
        (b'{"sweep": "\xff"}', "it is not UTF-8"),
        (
            json.dumps(
                {"sweep": EVIL, "cluster": EVIL, "description": EVIL, "run_ids": [], "dropped": 0, "written_unix_s": 0}
            ).encode(),
            "it is about the sweep '",
        ),
        (
            json.dumps(
                {
                    "sweep": "s",
                    "cluster": "local",
                    "description": "",
                    "run_ids": ["../../etc", EVIL],
                    "dropped": 0,
                    "written_unix_s": 0,
                }
            ).encode(),
            "'../../etc' is not a run_id",
        ),
    ],
    ids=["empty", "nested", "no text", "another name", "ids that are none"],
)
def test_a_broken_sweep_record_is_named_and_others_are_shown(tree: ClusterTree, content: bytes, reason: str) -> None:
    write(tree, document())
    (tree.root / "sweeps" / "bad.json").write_bytes(content.replace(b'"s"', b'"bad"'))
    for command in ("status", "table"):
        done = hpcbench(tree, command, "bad")
        assert (done.returncode, f"bad.json is no record of a sweep: {reason}" in done.stderr) == (3, True), done.stderr
        assert hpcbench(tree, command, "s").returncode == 0
        both = hpcbench(tree, command)
        assert (both.returncode, "Traceback" in both.stderr) == (0, False)
        assert CONTROL.findall(done.stdout + done.stderr + both.stdout + both.stderr) == []


def test_names_of_files_and_folders_carry_no_codes(tree: ClusterTree) -> None:
    write(tree, document())
    for folder in (tree.root.parent, tree.root / "sweeps", tree.root / "runs", tree.result_path(ID).parent):
        (folder / f"x{EVIL.replace('/', '')}").mkdir()
    (tree.root / "sweeps" / f"{EVIL}.json".replace("/", "")).write_bytes(tree.sweep_path("s").read_bytes())
    for arguments in (
        ["table"],
        ["status"],
        ["collect"],
        ["table", EVIL],
        ["table", "--cluster", EVIL],
        ["validate", EVIL],
        ["validate", "--where", EVIL],
        ["predict", EVIL, "--cluster", "local"],
        ["recommend", "--model", EVIL, "--dataset", EVIL, "--cluster", "local"],
        ["logs", EVIL],
    ):
        done = hpcbench(tree, *arguments)
        assert "Traceback" not in done.stderr
        assert CONTROL.findall(done.stdout + done.stderr) == []


@pytest.mark.parametrize("attempt", [b"[" * 100_000, b"\xff", b'{"attempt": "x"}'])
def test_logs_of_a_hostile_run_are_shown_without_escape_codes(
    tree: ClusterTree, attempt: bytes, tmp_path: Path
) -> None:
    folder = begin_attempt(tree.run_folder(ID), launch="l", host="h", started_unix_s=1.0).folder
    (folder / "attempt.json").write_bytes(attempt)
    (folder / "rank-0.json").write_bytes(attempt)
    (folder / "out.log").write_text(f"{EVIL}\n" * 100_000)
    (tmp_path / "secret").write_text("secret")
    (folder / "err.log").symlink_to(tmp_path / "secret")
    done = hpcbench(tree, "logs", ID)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 100_000)
    assert "err.log" in done.stderr
    assert "is a link: none is followed" in done.stderr
    assert "secret" not in done.stdout + done.stderr.replace(str(tmp_path), "")
    assert CONTROL.findall(done.stdout + done.stderr) == []


def on_a_terminal(*arguments: str, cwd: Path) -> str:
    """Return the output of a command on a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "hpcbench", *arguments], cwd=cwd, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        said = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:
                break
            if not part:
                break
            said += part
        process.wait(60)
    os.close(ours)
    return said.decode()


def test_scripts_and_profiles_are_shown_to_a_terminal_without_codes(tmp_path: Path) -> None:
    evil = "\x9b2J\u202e"
    (tmp_path / "clusters").mkdir()
    text = f'name = "mine"\ndescription = "a {evil} b"\n[env]\nA = "a {evil} \\u001b[2J b"\n'
    (tmp_path / "clusters" / "mine.toml").write_text(text)
    (tmp_path / "tiny.toml").write_text(
        'name = "tiny"\n[fixed]\nmodel = "resnet18"\ndataset = "digits"\nbatch_size = 4\nstrategy = "single"\n'
    )
    for arguments in (["cluster", "show", "mine"], ["render", "tiny.toml", "--cluster", "mine"], ["cluster", "list"]):
        shown = on_a_terminal(*arguments, cwd=tmp_path).replace("\r\n", "\n")
        # The colours are rich's own; what the profile holds comes after them.
        assert CONTROL.findall(re.sub(r"\x1b\[[0-9;]*m", "", shown)) == []
        assert "mine" in shown
    piped = subprocess.run(
        [sys.executable, "-m", "hpcbench", "cluster", "show", "mine"], cwd=tmp_path, capture_output=True, check=True
    )
    assert piped.stdout.decode() == text
