"""A cluster profile without the nodes that a report names as slow."""

from __future__ import annotations

from pathlib import Path

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.sweep_file import settings_lines
from hpcbench.errors import ConfigError, HpcbenchError
from hpcbench.fileio import printable_excerpt, write_file
from hpcbench.report.findings.findings_report import Findings

_FIRST_LINE = "# Written by `hpcbench report --exclude-slow`."


def write_exclusions(findings: Findings, path: Path, title: str) -> str:
    """Write a profile that extends the cluster's and excludes its slow nodes, and return a message about it.

    The nodes that the cluster's profile excludes stay excluded.

    Args:
        findings: those of a report on one cluster.
        path: the file, called as the cluster for results in the same tree.
        title: the sweeps of the report.

    Raises:
        ConfigError: nodes of several clusters are slow, or the file is another profile.
    """
    named = [finding for finding in findings.of_kind("node") if finding.slow_nodes]
    slow = sorted({node for finding in named for node in finding.slow_nodes})
    clusters = sorted({printable_excerpt(finding.cluster) for finding in named})
    if not slow:
        return f"no node is named as slow: {path} was not written"
    if len(clusters) > 1 or path.suffix != ".toml":
        hint = f"--cluster {clusters[0]} --exclude-slow {clusters[0]}.toml"
        raise ConfigError(f"--exclude-slow {path}: slow nodes of {', '.join(clusters)}", hint=hint)
    if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(_FIRST_LINE):
        raise ConfigError(f"--exclude-slow {path}: the file exists and is another profile", hint="name another file")
    try:
        excluded = load_cluster(clusters[0])[0].request.exclude_nodes
    except HpcbenchError:
        excluded = []
    settings = {"name": path.stem, "extends": clusters[0]}
    request = {"exclude_nodes": list(dict.fromkeys([*excluded, *slow]))}
    sources = printable_excerpt(" ".join(title.split()))
    about = f"# Slow nodes of {sources}; a later report writes the file anew."
    lines = [_FIRST_LINE, about, *settings_lines(settings), "", "[request]", *settings_lines(request)]
    write_file(path, ("\n".join(lines) + "\n").encode())
    return f"{len(slow)} of the nodes of {clusters[0]} excluded in {path}: hpcbench submit SWEEP --cluster {path}"
