"""Scores read back from the printed output of ``validate``, where no other file has them."""

from __future__ import annotations

import re
from typing import Any

_SUMMARY = re.compile(
    r"(?P<name>\S+) +(?P<count>\d+) +(?P<mean>-?[\d.]+)(?: \[-?[\d.]+ -?[\d.]+\])? +-?[\d.]+ +-?[\d.]+ +\d+% +"
    r"(?P<signed>[+-][\d.]+)"
)
_PREDICTOR = re.compile(
    r"(?P<name>\w+) +(?P<count>\d+) +(?P<mean>-?[\d.]+) \[-?[\d.]+ -?[\d.]+\](?: +(?P<other>-?[\d.]+))? +"
    r"(?P<signed>[+-][\d.]+) +-?[\d.]+ +(?P<regret>[\d.]+)% +(?P<worst>[\d.]+)%"
)
_MEMORY = "peak_memory_bytes"


def printed_document(text: str) -> dict[str, Any]:
    """Return the scores and choices that ``text`` shows, rounded as they were printed, as ``validate --json`` has them.

    Choices of DDLBench's equations did not fit into its columns.
    """
    strategies = {row["name"]: _summary(row) for row in _SUMMARY.finditer(_section(text, "step time, by strategy"))}
    strategies.pop("all")
    parts = [row for row in _SUMMARY.finditer(_section(text, "parts, each by itself")) if row["name"] == "memory"]
    scores = [
        {
            "predictor": row["name"],
            "total": _summary(row),
            "strategies": strategies if row["name"] == "hpcbench" else {},
            "parts": {_MEMORY: _summary(parts[0])} if row["name"] == "hpcbench" and parts else {},
            "ranking": {"groups": 1, "regret": float(row["regret"]) / 100, "worst_regret": float(row["worst"]) / 100},
            "other": None if row["other"] is None else float(row["other"]) / 100,
        }
        for row in _PREDICTOR.finditer(_section(text, "against the baselines"))
    ]
    return {"scores": scores, "choices": list(_choices(_section(text, "which strategy each would have chosen")))}


def _section(text: str, title: str) -> str:
    """The lines from a title to the next one."""
    begin = text.index(f"\n{title}\n")
    ends = [text.find(f"\n{other}\n", begin + 1) for other in _TITLES]
    return text[begin : min((end for end in ends if end > 0), default=len(text))]


_TITLES = (
    "step time, by strategy", "parts, each by itself", "against the baselines", "which strategy each would have chosen",
)  # fmt: skip


def _summary(row: re.Match[str]) -> dict[str, Any]:
    return {"count": int(row["count"]), "mean": float(row["mean"]) / 100, "signed": float(row["signed"]) / 100}


def _choices(section: str) -> list[dict[str, str]]:
    lines = section.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("model "))
    names = [name.strip() for name in re.split(r" {2,}", lines[head].strip())]
    rows = []
    for line in lines[head + 2 :]:
        cells = re.split(r" {2,}", line.strip())
        if len(cells) != len(names):
            break
        row = dict(zip(names, (re.sub(r" (\+\d+%|\?)$", "", cell) for cell in cells), strict=True))
        rows.append({"best": row["measured best"], "hpcbench": row["hpcbench"], "paradl": row["paradl"]})
    return rows
