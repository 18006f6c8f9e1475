"""Bundles as they are made, and as somebody who means harm would make them."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcbench.config.run_spec import RunSpec, run_id
from hpcbench.errors import ConfigError
from hpcbench.fileio import encode_indented_json
from hpcbench.results import bundle_archive
from hpcbench.results.bundle_archive import (
    BundledSweep,
    BundleHeader,
    BundleWriter,
    collect_bundle_results,
)
from hpcbench.results.results_tree import CollectedResult
from hpcbench.results.schema import RunResult, result_document
from tests.results import planted

SPECS = [RunSpec(model="resnet18", dataset="digits", strategy="single", batch_size=size) for size in (8, 16, 32)]
IDS = [run_id(spec) for spec in SPECS]
HEADER = BundleHeader(
    format_version=1, hpcbench="0", python="3", logs=False,
    sweeps=[BundledSweep(sweep="s", cluster="c", run_ids=IDS)],
)  # fmt: skip


def result(number: int) -> RunResult:
    return planted.result(spec=SPECS[number])


def place(number: int, cluster: str = "c") -> str:
    return f"{cluster}/runs/{IDS[number][:2]}/{IDS[number]}/result.json"


def data(number: int) -> bytes:
    return encode_indented_json(result_document(result(number)))


def manifest(files: dict[str, bytes]) -> bytes:
    entries = {
        name: {"sha256": hashlib.sha256(body).hexdigest(), "size_bytes": len(body)} for name, body in files.items()
    }
    return encode_indented_json({"files": entries})


def write(path: Path, numbers: tuple[int, ...] = (0, 1, 2)) -> Path:
    with open(path, "wb") as file, BundleWriter(file, HEADER) as writer:
        for number in sorted(numbers, key=place):
            writer.add(place(number), data(number))
    return path


def evil(path: Path, *members: tuple[str | tarfile.TarInfo, bytes], listed: dict[str, bytes] | None = None) -> Path:
    """A bundle of one good run, and ``members`` that only its maker knows why."""
    files = {place(0): data(0)} if listed is None else listed
    with tarfile.open(path, "w:gz", format=tarfile.GNU_FORMAT) as archive:
        known = [
            ("bundle.json", encode_indented_json(HEADER)),
            (place(0), data(0)),
            *members,
            ("manifest.json", manifest(files)),
        ]
        for name, body in known:
            member = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            if member.isreg():
                member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
    return path


def member(name: str, kind: bytes, **values: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in values.items():
        setattr(info, key, value)
    return info, b""


def only_problem(path: Path) -> CollectedResult:
    """Check that the good run was read and nothing was written; return the one problem."""
    before = sorted(path.parent.rglob("*"))
    good, bad = collect_bundle_results(path)
    assert good.result == result(0)
    assert bad.result is None
    assert sorted(path.parent.rglob("*")) == before
    return bad


def test_a_bundle_is_read_in_the_order_of_the_sweep(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar.gz")
    assert collect_bundle_results(path) == [CollectedResult("c", IDS[number], result(number)) for number in range(3)]
    assert collect_bundle_results(path, ["c"]) == collect_bundle_results(path)
    assert collect_bundle_results(path, ["d"]) == []
    with tarfile.open(path) as archive:
        assert archive.getnames()[0] == "bundle.json"
        assert archive.getnames()[-1] == "manifest.json"


def test_the_same_files_make_the_same_bytes(tmp_path: Path) -> None:
    assert write(tmp_path / "one.tar.gz").read_bytes() == write(tmp_path / "two.tar.gz").read_bytes()


def test_a_run_without_a_result_is_passed_over_as_in_a_tree(tmp_path: Path) -> None:
    assert [entry.run_id for entry in collect_bundle_results(write(tmp_path / "x.tar.gz", (0, 2)))] == [IDS[0], IDS[2]]


def test_a_repacked_archive_gives_the_same_results(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tar.gz")
    (tmp_path / "folder").mkdir()
    subprocess.run(["tar", "xzf", path, "-C", tmp_path / "folder"], check=True)
    subprocess.run(
        ["tar", "czf", tmp_path / "y.tgz", "-C", tmp_path / "folder", "./bundle.json", "./c", "./manifest.json"],
        check=True,
    )
    assert collect_bundle_results(tmp_path / "y.tgz") == collect_bundle_results(path)


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/cron.d/x", "c/../../x", "c/runs/./x", "c//x", "c/\x1b[2J", "c/a b", "~/x", "-x/\n"]
)
def test_entries_outside_a_results_tree_are_skipped(tmp_path: Path, name: str) -> None:
    problem = only_problem(evil(tmp_path / "x.tar.gz", (name, b"data")))
    assert (problem.cluster, problem.run_id, problem.problem) == (
        "x.tar.gz", name, "passed over: its name is none of a file in a tree",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (tarfile.SYMTYPE, {"linkname": "/etc/passwd"}),
        (tarfile.LNKTYPE, {"linkname": place(0)}),
        (tarfile.CHRTYPE, {"devmajor": 1, "devminor": 5}),
        (tarfile.BLKTYPE, {"devmajor": 8}),
        (tarfile.FIFOTYPE, {}),
        (b"Z", {}),
    ],
)
def test_a_member_that_is_no_plain_file_is_refused(tmp_path: Path, kind: bytes, values: dict[str, Any]) -> None:
    problem = only_problem(evil(tmp_path / "x.tar.gz", member(place(1), kind, **values)))
    assert (problem.run_id, "it is not a plain file" in problem.problem) == (place(1), True)


def test_a_result_with_a_duplicate_entry_is_not_read(tmp_path: Path) -> None:
    (entry,) = collect_bundle_results(evil(tmp_path / "x.tar.gz", (place(0), data(0).replace(b"1.5", b"9.5"))))
    assert (entry.run_id, entry.result) == (IDS[0], None)
    assert "there twice" in entry.problem


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{half", "result.json is broken"),
        (b"[" * 1_000_000, "result.json is broken"),
        (b"\xff", "result.json is broken"),
        (data(0), "lies where that of"),
    ],
    ids=["half", "nested", "no text", "another run's"],
)
def test_a_broken_result_is_a_row_with_the_reason(tmp_path: Path, body: bytes, reason: str) -> None:
    listed = {place(0): data(0), place(1): body}
    problem = only_problem(evil(tmp_path / "x.tar.gz", (place(1), body), listed=listed))
    assert (problem.cluster, problem.run_id, reason in problem.problem) == ("c", IDS[1], True)


@pytest.mark.parametrize(
    ("name", "body", "listed", "reason"),
    [
        (place(1), data(1), {place(0): data(0), place(1): data(2)}, "its SHA-256 is not the one in manifest.json"),
        (place(1), data(1), {place(0): data(0)}, "manifest.json does not list it"),
        (place(1, "d"), data(1), {place(0): data(0), place(1, "d"): data(1)}, "no sweep of bundle.json means this run"),
        ("c/y", b"", {place(0): data(0), "c/y": b"", place(1): b""}, "manifest.json lists it, but it is not there"),
    ],
)
def test_a_member_that_contradicts_the_manifest_is_refused(
    tmp_path: Path, name: str, body: bytes, listed: dict[str, bytes], reason: str
) -> None:
    assert reason in only_problem(evil(tmp_path / "x.tar.gz", (name, body), listed=listed)).problem


def test_a_million_strange_members_are_not_a_million_rows(tmp_path: Path) -> None:
    path = evil(tmp_path / "x.tar.gz", *((f"/etc/{number}", b"") for number in range(3000)))
    entries = collect_bundle_results(path)
    assert len(entries) == 22
    assert entries[-1].problem == "980 or more other members were passed over, too"


def with_size(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


BODY = encode_indented_json(HEADER)
HEAD = with_size("bundle.json", len(BODY)) + BODY + bytes(-len(BODY) % 512)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "has no manifest.json: it is cut short, or no bundle"),
        (b"no archive at all".ljust(512), "is damaged, or no .tar.gz"),
        (with_size("x", 0), "is not a bundle: it does not begin with bundle.json"),
        (HEAD, "has no manifest.json"),
        (HEAD + with_size("c/x", 10_000) + b"short", "is damaged, or no .tar.gz: it ends within a member"),
        (HEAD + with_size("c/x", 64 * 2**20 + 1), "has 67108865 bytes, at most 67108864 are read"),
        (HEAD + with_size("c/x", 2**60), "has 1152921504606846976 bytes, at most 67108864 are read"),
        (HEAD + with_size("././@LongLink", 2**40, tarfile.GNUTYPE_LONGNAME), "has 1099511627776 bytes"),
        (HEAD + with_size("pax", 2**33, tarfile.XHDTYPE), "has 8589934592 bytes"),
        (HEAD + with_size("c/x", -1), "has -1 bytes"),
        (HEAD + b"\x01" * 512, "is damaged"),
        (with_size("bundle.json", 1) + b"{".ljust(512, b"\0"), "bundle.json is broken"),
    ],
)
def test_invalid_archives_are_refused_with_the_reason(tmp_path: Path, raw: bytes, reason: str) -> None:
    path = tmp_path / "x.tar.gz"
    path.write_bytes(gzip.compress(raw))
    with pytest.raises(ConfigError) as caught:
        collect_bundle_results(path)
    assert reason in str(caught.value)


def test_damaged_or_absent_archive_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.tar.gz"
    for body in (b"", b"plain", gzip.compress(HEAD)[:-20], write(tmp_path / "y.tar.gz").read_bytes()[:-40]):
        path.write_bytes(body)
        with pytest.raises(ConfigError, match=r"damaged|cut short"):
            collect_bundle_results(path)
    path.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        collect_bundle_results(path)
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="not a plain file"):
        collect_bundle_results(path)


def test_an_archive_with_too_many_members_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.tar.gz")
    monkeypatch.setattr(bundle_archive, "MAX_MEMBERS", 5)
    assert len(collect_bundle_results(path)) == 3
    monkeypatch.setattr(bundle_archive, "MAX_MEMBERS", 4)
    with pytest.raises(ConfigError, match=r"more than 4 members \(this is number 5\)"):
        collect_bundle_results(path)
    with pytest.raises(ConfigError, match="more than 4 files"):
        write(tmp_path / "y.tar.gz")


def test_a_later_format_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.tar.gz"
    with open(path, "wb") as file, BundleWriter(file, msgspec.structs.replace(HEADER, format_version=2, hpcbench="9")):
        pass
    with pytest.raises(ConfigError, match=r"has format 2, made by hpcbench 9; this hpcbench reads format 1"):
        collect_bundle_results(path)
