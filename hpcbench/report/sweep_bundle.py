"""Selection of a sweep's files for a bundle (record, results, attempts, submissions), with optional anonymisation."""

from __future__ import annotations

import os
import platform
import pwd
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

import hpcbench
from hpcbench.errors import HpcbenchError
from hpcbench.fileio import MAX_FILE_BYTES, encode_indented_json, make_folder, open_atomic, open_regular
from hpcbench.identity import account_name
from hpcbench.paths import project_folder
from hpcbench.results.anonymize import Anonymizer
from hpcbench.results.attempts import attempt_numbers
from hpcbench.results.bundle_archive import (
    BUNDLE_FORMAT_VERSION,
    BundledSweep,
    BundleHeader,
    BundleWriter,
)
from hpcbench.results.results_tree import ClusterTree, ResultsTree
from hpcbench.results.schema import SCHEMA_VERSION
from hpcbench.submit.journal import journal_paths, read_journal
from hpcbench.submit.scheduler import job_log, scheduler_class
from hpcbench.submit.submission_record import NewestSubmission, Submission, SweepRecord, list_submissions

MAX_LOG_BYTES = 16 * 2**20
"""Maximum size of a log in a bundle; only the end of a longer one is bundled."""
_RANK_FILE = re.compile(r"rank-[0-9]+\.json")
_LAYOUT_NAME = re.compile(
    r"runs|sweeps|submissions|attempts|jobs|[0-9a-f]{2}|[0-9a-f]{16}|[0-9]+"
    r"|(?:[0-9]+|stop|sent-[0-9]+)\.(?:sh|jsonl)|(?:out|err|queue)\.log|(?:result|attempt|submission|dropped|rank-[0-9]+)\.json"
)


@dataclass(frozen=True)
class BundleSummary:
    """Numbers of runs and files, and the reasons why files were left out."""

    runs: int
    files: int
    left_out: dict[str, str]


@dataclass(frozen=True)
class _BundledFile:
    """A file of the tree and the name that it gets in the bundle."""

    name: str
    path: Path
    owner: ClusterTree

    def open(self) -> IO[bytes]:
        """Open the file, a log at its end. Raises ``OSError`` or ``HpcbenchError`` if it cannot be bundled."""
        self.owner.path(*self.path.relative_to(self.owner.root).parts)
        file: IO[bytes] = open(open_regular(self.path), "rb")  # noqa: SIM115 - the caller closes it
        size = os.fstat(file.fileno()).st_size
        if self.path.suffix in (".log", ".out"):
            file.seek(max(0, size - MAX_LOG_BYTES))
        elif size > MAX_FILE_BYTES:
            file.close()
            raise OSError(f"it has {size} bytes, at most {MAX_FILE_BYTES} are bundled")
        return file

    def read(self) -> tuple[bytes, int]:
        """The content and the owner's uid."""
        with self.open() as file:
            return file.read(MAX_FILE_BYTES), os.fstat(file.fileno()).st_uid


def write_bundle(
    tree: ResultsTree, sweeps: Sequence[tuple[str, SweepRecord]], out: Path, *, logs: bool, anonymous: bool
) -> BundleSummary:
    """Write ``sweeps`` (cluster and record of each) into the file ``out``."""
    by_name: dict[str, _BundledFile] = {}
    for cluster, record in sweeps:
        owner = tree.cluster(cluster)
        for path in _sweep_paths(owner, record, logs):
            name = f"{owner.root.name}/{path.relative_to(owner.root).as_posix()}"
            by_name[name] = _BundledFile(name, path, owner)
    left_out: dict[str, str] = {}
    files = [by_name[name] for name in sorted(by_name) if _is_readable(by_name[name], left_out)]
    anonymizer = _build_anonymizer(tree, files) if anonymous else None
    bundled = [BundledSweep(sweep=record.sweep, cluster=name, run_ids=record.run_ids) for name, record in sweeps]
    header = BundleHeader(
        format_version=BUNDLE_FORMAT_VERSION, hpcbench=hpcbench.__version__,
        schema_version=SCHEMA_VERSION, python=platform.python_version(), anonymous=anonymous, logs=logs,
        sweeps=bundled, left_out=left_out,
    )  # fmt: skip
    if anonymizer is not None:
        header = msgspec.convert(anonymizer.document(msgspec.to_builtins(header)), BundleHeader)
    make_folder(out.parent)
    with open_atomic(out) as stream, BundleWriter(stream, header) as writer:
        for file in files:
            data, _ = file.read()
            if anonymizer is None:
                writer.add(file.name, data)
            else:
                writer.add(_anonymize_name(file.name, anonymizer), _anonymize_file(file, data, anonymizer))
    runs = len({(cluster, run_id) for cluster, record in sweeps for run_id in record.run_ids})
    return BundleSummary(runs, len(files), left_out)


def _is_readable(file: _BundledFile, left_out: dict[str, str]) -> bool:
    try:
        file.open().close()
    except FileNotFoundError:
        return False
    except (OSError, HpcbenchError) as error:
        left_out[file.name] = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return False
    return True


def _sweep_paths(tree: ClusterTree, record: SweepRecord, logs: bool) -> Iterator[Path]:
    """Paths of a sweep's files, whether they exist or not."""
    yield tree.root / "sweeps" / f"{record.sweep}.json"
    for run_id in record.run_ids:
        folder = tree.root / "runs" / run_id[:2] / run_id
        yield folder / "result.json"
        yield from _attempt_files(tree, run_id, folder, logs)
    run_ids = set(record.run_ids)
    for folder, submission in list_submissions(tree):
        if submission.sweep == record.sweep or any(run_ids & set(array.run_ids) for array in submission.arrays):
            yield from _submission_files(folder, submission, run_ids if logs else set())


def _attempt_files(tree: ClusterTree, run_id: str, folder: Path, logs: bool) -> list[Path]:
    """Files of the attempt that counts: the result's, or the newest of a run without a result."""
    try:
        result = tree.read_result(run_id)
        tree.run_folder(run_id)
    except (msgspec.MsgspecError, HpcbenchError):
        result = None
    numbers = attempt_numbers(folder) if not folder.is_symlink() else []
    number = result.attempt if result is not None else max(numbers, default=0)
    if number not in numbers:
        return []
    attempt = folder / "attempts" / str(number)
    names = ["attempt.json", *sorted(name for name in os.listdir(attempt) if _RANK_FILE.fullmatch(name))]
    return [attempt / name for name in (*names, *(("out.log", "err.log") if logs else ()))]


def _submission_files(folder: Path, submission: Submission, logs_of: set[str]) -> Iterator[Path]:
    yield folder / "submission.json"
    if logs_of and (queue_log := scheduler_class(submission.scheduler, submission.cluster).queue_log):
        yield folder / queue_log
    yield from (folder / "stop.jsonl", folder / "dropped.json", *journal_paths(folder))
    for array in submission.arrays:
        yield folder / f"{array.number}.sh"
        yield folder / f"{array.number}.jsonl"
    newest = NewestSubmission(folder, submission, read_journal(folder), logs_of)
    logs = (job_log(run) for _, run in newest.runs())
    yield from dict.fromkeys(log for log in logs if log is not None)


def _build_anonymizer(tree: ResultsTree, files: list[_BundledFile]) -> Anonymizer:
    """Learn names from all files before any is anonymized: a name in one file may occur in another."""
    anonymizer = Anonymizer()
    for folder in (tree.root, tree.root.resolve()):
        anonymizer.learn_folder("tree", str(folder))
    anonymizer.learn_folder("project", str(project_folder()))
    owners = {os.getuid()}
    for file in files:
        data, owner = file.read()
        owners.add(owner)
        _transform_file(file, data, anonymizer.learn_document, anonymizer.learn_text)
    for owner in sorted(owners):
        try:
            account = pwd.getpwuid(owner)
        except KeyError:
            continue
        anonymizer.learn_user(account.pw_name, account.pw_dir, account.pw_gecos.split(",")[0])
    anonymizer.learn_user(account_name(), os.environ.get("HOME"))
    anonymizer.learn_hosts(socket.gethostname())
    for file in files:
        _anonymize_file(file, file.read()[0], anonymizer)
    return anonymizer


def _anonymize_name(name: str, anonymizer: Anonymizer) -> str:
    parts = name.split("/")
    return "/".join(part if _LAYOUT_NAME.fullmatch(part) else anonymizer.text(part) for part in parts)


def _anonymize_file(file: _BundledFile, data: bytes, anonymizer: Anonymizer) -> bytes:
    is_lines = file.path.suffix == ".jsonl"
    encode = msgspec.json.encode if is_lines else encode_indented_json
    parts = [
        part.encode(errors="surrogateescape") if isinstance(part, str) else encode(part)
        for part in _transform_file(file, data, anonymizer.document, anonymizer.text)
    ]
    return b"".join(part + b"\n" if is_lines else part for part in parts)


def _transform_file(
    file: _BundledFile, data: bytes, document: Callable[[Any], Any], text: Callable[[str], Any]
) -> list[Any]:
    """Apply ``document`` to the JSON values of a file, and ``text`` to broken JSON and to any other file."""
    if file.path.suffix not in (".json", ".jsonl"):
        return [text(data.decode(errors="surrogateescape"))]
    parts = []
    for part in data.splitlines() if file.path.suffix == ".jsonl" else [data]:
        try:
            parts.append(document(msgspec.json.decode(part)))
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            parts.append(text(part.decode(errors="surrogateescape")))
    return parts
