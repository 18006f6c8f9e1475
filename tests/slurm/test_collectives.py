"""Bus bandwidth on links of a known rate, and a slowed node and a slowed link that a report names."""

from __future__ import annotations

import contextlib
import json
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcbench.config.cluster_profile import load_cluster
from tests.slurm.box import paths
from tests.slurm.box.network import host_end, tbf_args

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

Command = Callable[..., "subprocess.CompletedProcess[str]"]
Results = Callable[[], list[dict[str, Any]]]

LINK_BITS_PER_S, RATE_BITS_PER_S = 10**9, 5 * 10**8
PAYLOAD_SHARE = 1448 / 1514
"""The shaped rate counts the headers of Ethernet, IP and TCP."""
COLLECTIVES = """\
name = "{name}"
repeats = {repeats}
[fixed]
workload = "collectives"
warmup_steps = 1
steps = 5
time_limit_min = 5
{more}
[submit]
pack = {repeats}
max_running_jobs = 1
"""
NODES = """\
name = "nodes"
repeats = 5
[command]
argv = [{python}, {script}, "{port}"]
[[command.metrics]]
name = "step_time"
unit = "s"
better = "lower"
per = "step"
pattern = 'read in ([0-9.]+)'
[fixed]
warmup_steps = 1
time_limit_min = 5
[grid]
node = "each"
[submit]
pack = 5
"""
READ = """\
import socket, sys, time
for step in range(6):
    began_s = time.perf_counter()
    with socket.create_connection(("10.77.0.254", int(sys.argv[1]))) as connection:
        while connection.recv(1 << 20):
            pass
    print(f"read in {time.perf_counter() - began_s:.6f}")
"""
"""Reads from this machine over the node's link: processors of a busy machine do not matter to its time."""


def tc(node: str, *words: str) -> None:
    subprocess.run(["tc", "-n", paths.netns(node), *words], check=True)


@contextlib.contextmanager
def links_of(bits_per_s: int, *nodes: str) -> Iterator[None]:
    """Another rate of the links of ``nodes``. At the usual one the processors of the box are as busy as its links."""
    try:
        shape(bits_per_s, nodes)
        yield
    finally:
        shape(LINK_BITS_PER_S, nodes)


def shape(bits_per_s: int, nodes: Sequence[str]) -> None:
    for node in nodes:
        tc(node, "qdisc", "replace", "dev", "eth0", *tbf_args(bits_per_s))
        subprocess.run(["tc", "qdisc", "replace", "dev", host_end(node), *tbf_args(bits_per_s)], check=True)


@contextlib.contextmanager
def slow_link(first: str, second: str) -> Iterator[None]:
    """A fifth of the rate between two nodes, in both directions."""
    try:
        for node, other in ((first, second), (second, first)):
            address = f"10.77.0.{other.removeprefix('n')}/32"
            tc(node, "qdisc", "replace", "dev", "eth0", "root", "handle", "1:", "htb", "default", "10", "r2q", "1000")
            tc(node, "class", "add", "dev", "eth0", "parent", "1:", "classid", "1:10", "htb", "rate", "1gbit")
            tc(node, "class", "add", "dev", "eth0", "parent", "1:", "classid", "1:20", "htb", "rate", "200mbit")
            match = ("u32", "match", "ip", "dst", address, "flowid", "1:20")
            tc(node, "filter", "add", "dev", "eth0", "parent", "1:", "protocol", "ip", *match)
        yield
    finally:
        for node in (first, second):
            tc(node, "qdisc", "replace", "dev", "eth0", *tbf_args(LINK_BITS_PER_S))


@contextlib.contextmanager
def served(size_bytes: int) -> Iterator[int]:
    """The port of a server that sends so many bytes to whoever connects, and closes."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(bytes(size_bytes))

    with socketserver.ThreadingTCPServer(("10.77.0.254", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def run(hpcbench: Command, tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / f"{name}.toml"
    path.write_text(text)
    done = hpcbench("run", str(path), "--cluster", "slurmbox")
    assert done.returncode == 0, done.stderr + done.stdout


def node_findings(hpcbench: Command, name: str) -> list[dict[str, Any]]:
    found = json.loads(hpcbench("report", name, "--json").stdout)["findings"]
    return [finding for finding in found if finding["kind"] == "node"]


@pytest.mark.parametrize(
    ("figure", "lowest"),
    [
        # Other load takes a part of the rate. A wrong factor of an operation would take a third of one of both.
        ("p90", 0.75),
        pytest.param("median", 0.95, marks=pytest.mark.soak),
    ],
)
def test_the_bus_bandwidth_of_all_reduce_is_that_of_the_links(
    hpcbench: Command, results: Results, tmp_path: Path, figure: str, lowest: float
) -> None:
    more = 'operation = "all_reduce"\nmessage_bytes = 67108864\n[grid]\nnodes = [2, 4]'
    with links_of(RATE_BITS_PER_S, "n1", "n2", "n3", "n4"):
        run(hpcbench, tmp_path, "bandwidth", COLLECTIVES.format(name="bandwidth", repeats=1, more=more))
    limit_bytes_per_s = PAYLOAD_SHARE * RATE_BITS_PER_S / 8
    shares = {
        result["spec"]["nodes"]: result["metrics"]["bus_bandwidth"][figure] / limit_bytes_per_s for result in results()
    }
    assert set(shares) == {2, 4}
    assert all(lowest <= share <= 1.05 for share in shares.values()), shares


PAIRS = 'operation = "pairs"\nmessage_bytes = 2097152\nnodes = 4'


@pytest.mark.soak
def test_no_link_is_named_where_all_are_equal(hpcbench: Command, tmp_path: Path) -> None:
    run(hpcbench, tmp_path, "equal", COLLECTIVES.format(name="equal", repeats=3, more=PAIRS))
    (equal,) = node_findings(hpcbench, "equal")
    assert (equal["sure"], equal["text"]) == ("observed", "no link is slower than the others")


def test_a_slow_link_is_named(hpcbench: Command, tmp_path: Path) -> None:
    with slow_link("n2", "n4"):
        run(hpcbench, tmp_path, "slow", COLLECTIVES.format(name="slow", repeats=3, more=PAIRS))
    (slow,) = node_findings(hpcbench, "slow")
    assert (slow["sure"], slow.get("slow_nodes", [])) == ("significant", [])
    assert slow["text"].startswith("slower than the other links: n2 - n4 (4")


def test_a_slow_node_is_named_and_excluded(hpcbench: Command, results: Results, tmp_path: Path) -> None:
    script = tmp_path / "read.py"
    script.write_text(READ)
    with served(4 * 2**20) as port, links_of(LINK_BITS_PER_S // 4, "n3"):
        words = {"python": json.dumps(sys.executable), "script": json.dumps(str(script))}
        run(hpcbench, tmp_path, "nodes", NODES.format(port=port, **words))
    assert all(result["ranks"][0]["host"] == result["spec"]["node"] for result in results())
    (slow,) = node_findings(hpcbench, "nodes")
    assert (slow["sure"], slow["slow_nodes"]) == ("significant", ["n3"])
    profile = tmp_path / "slurmbox.toml"
    assert hpcbench("report", "nodes", "--exclude-slow", str(profile)).returncode == 0
    assert load_cluster(str(profile))[0].request.exclude_nodes == ["n3"]
    plan = json.loads(hpcbench("plan", str(tmp_path / "nodes.toml"), "--cluster", str(profile), "--json").stdout)
    assert sorted({run["spec"]["node"] for run in plan["runs"]}) == ["n1", "n2", "n4"]
