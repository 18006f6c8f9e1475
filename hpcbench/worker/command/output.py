"""The output of a command's process: kept in a file of bounded size, and searched for metrics and patterns."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import math
import re
import time
from collections import deque
from io import BufferedReader
from pathlib import Path
from typing import IO

import msgspec

from hpcbench.config.command import STEP_TIME, Command
from hpcbench.errors import WorkerError
from hpcbench.fileio import printable_text

MAX_LOG_BYTES = 32 * 2**20
"""The largest log of a process; the lines after it are left out, but for the last ones."""
MAX_LINE_BYTES = 64 * 2**10
MAX_VALUES = 50_000
"""About so many values of a metric are read."""
_CHUNK_BYTES = 2**20
_LAST_LINES, _KEPT_CHARS = 300, 1000


class CommandOutput:
    """The output of a process, line by line.

    Args:
        command: its patterns and metrics.
        log: the file that the lines are written to; it must not exist.
        warmup_steps: values of a step time that do not count.
    """

    def __init__(self, command: Command, log: Path, warmup_steps: int = 0) -> None:
        self.values: dict[str, list[float]] = {}
        """Values of each metric that was found, in the order of the lines."""
        self.matched: set[str] = set()
        """The patterns of ``must_match`` that a line matches."""
        self.forbidden: str | None = None
        """The first line that matches a pattern of ``must_not_match``, with the pattern."""
        self.first_step_s: float | None = None
        """``time.monotonic()`` of the first value of a metric per step."""
        self.timed_unix_s: tuple[float, float] | None = None
        """When the value before the first timed step, or the first step's own, and the last value were printed."""
        self.log_error: str | None = None
        """The last reason for which lines are missing in the log."""
        self.last: deque[str] = deque(maxlen=_LAST_LINES)
        """The beginnings of the last lines."""
        self._warmup_steps = warmup_steps
        self._metrics = [(one, _compiled(one.pattern)) for one in command.metrics if one.pattern is not None]
        self._wanted = {text: _compiled(text) for text in command.must_match}
        self._unwanted = {text: _compiled(text) for text in command.must_not_match}
        self._file: IO[bytes] = log.open("xb", buffering=0)
        self._written = self._left_out = 0

    def read(self, stream: BufferedReader) -> None:
        """Read ``stream`` to its end; a line longer than ``MAX_LINE_BYTES`` counts as several."""
        rest = b""
        while data := stream.read1(_CHUNK_BYTES):
            self._keep(data)
            # A progress bar writes over its own line.
            *lines, rest = re.split(rb"[\r\n]+", rest + data)
            if len(rest) > MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            self._search([line.decode(errors="replace") for line in lines if line])
        self._search([rest.decode(errors="replace")] if rest else [])
        if self._left_out:
            note = f"\n... {self._left_out} bytes are left out; the last lines:\n" + "\n".join(self.last) + "\n"
            with contextlib.suppress(OSError):
                self._file.write(note.encode())
        self._file.close()

    def _keep(self, data: bytes) -> None:
        kept = data[: MAX_LOG_BYTES - self._written]
        try:
            count = self._file.write(kept)
        except OSError as error:
            # The program goes on while the disk is full, and its values are in memory.
            count, self.log_error = 0, error.strerror
        self._written += count
        self._left_out += len(data) - count

    def _search(self, lines: list[str]) -> None:
        self.last.extend(line[:_KEPT_CHARS] for line in lines)
        # Most patterns match no line of a large piece: one search finds that out.
        text = "\n".join(lines)
        for metric, pattern in self._metrics:
            values = self.values.get(metric.name, [])
            if len(values) < MAX_VALUES and pattern.search(text):
                found = ((match[1], line) for line in lines if (match := pattern.search(line)))
                values += [to_number(metric.name, number, line) for number, line in found]
                self.values[metric.name] = values
                if metric.per == "step" and self.first_step_s is None:
                    self.first_step_s = time.monotonic()
                if metric.name == STEP_TIME and len(values) >= self._warmup_steps:
                    now_s = time.time()
                    self.timed_unix_s = (self.timed_unix_s or (now_s,))[0], now_s
        for wanted, pattern in self._wanted.items():
            if wanted not in self.matched and pattern.search(text) and any(map(pattern.search, lines)):
                self.matched.add(wanted)
        for unwanted, pattern in self._unwanted.items():
            if self.forbidden is None and pattern.search(text):
                line = next(filter(pattern.search, lines), None)
                if line is not None:
                    self.forbidden = f"{unwanted!r} matches the line {printable_text(line)!r:.200}"

    def similar_lines(self, pattern: str) -> list[str]:
        """Return the three of the last lines that look most like ``pattern``, for a message about it."""
        words = re.sub(r"\\.|[^\w ]", " ", pattern)
        return difflib.get_close_matches(words, list(dict.fromkeys(self.last)), n=3, cutoff=0.0)


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.MULTILINE)


_GROUPED = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?")


def to_number(name: str, text: object, line: str) -> float:
    """Return the finite number ``text`` of the metric ``name``: ``0.5``, ``1e3``, ``12,345``.

    Raises ``WorkerError`` if it is none.
    """
    digits = str(text)
    try:
        value = float(digits.replace(",", "") if _GROUPED.fullmatch(digits) else digits)
    except ValueError:
        value = math.nan
    if isinstance(text, bool) or not math.isfinite(value):
        raise WorkerError(f"the metric {name} is {text!r:.80}, no finite number, in: {printable_text(line):.200}")
    if name == STEP_TIME and value < 0:
        raise WorkerError(f"the metric {name} is {value}, and a time is at least 0, in: {printable_text(line):.200}")
    return value


def read_metrics_file(command: Command, path: Path) -> dict[str, list[float]]:
    """Return the values of the metrics with ``json`` in the lines of ``$HPCBENCH_METRICS``.

    Raises:
        WorkerError: a line is not a JSON object, or a value no finite number.
    """
    keys = {metric.json: metric.name for metric in command.metrics if metric.json is not None}
    values: dict[str, list[float]] = {}
    if not path.exists():
        return values
    with path.open("rb") as file:
        lines = list(itertools.islice(iter(lambda: file.readline(MAX_LINE_BYTES), b""), MAX_VALUES))
    for number, line in enumerate(lines, start=1):
        try:
            entry = msgspec.json.decode(line, type=dict[str, object])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise WorkerError(f"{path}:{number} is not a JSON object: {error}") from error
        for key in keys.keys() & entry.keys():
            text = line.decode(errors="replace")
            values.setdefault(keys[key], []).append(to_number(keys[key], entry[key], text))
    return values
