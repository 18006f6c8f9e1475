"""The box's pure parts: sizes, limits, addresses and configuration texts. Needs neither root nor SLURM."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from . import cli, lock, machine, paths, slurmconf
from .errors import BoxError
from .options import GIB, MIB, Options, parse_link, parse_mem


@pytest.mark.parametrize(
    ("text", "size"),
    [("3g", 3 * GIB), ("3G", 3 * GIB), ("3GiB", 3 * GIB), ("512m", 512 * MIB), ("1.5g", 1536 * MIB)],
)
def test_a_memory_size_is_parsed_to_bytes(text: str, size: int) -> None:
    assert parse_mem(text) == size


@pytest.mark.parametrize("text", ["", "g", "3x", "-3g", "3 giga"])
def test_bad_mem_names_the_text_and_an_example(text: str) -> None:
    with pytest.raises(BoxError, match="write it like 3g"):
        parse_mem(text)


@pytest.mark.parametrize("text", ["", "1g", "fast", "1gbyte", "-1gbit"])
def test_bad_link_names_the_text_and_an_example(text: str) -> None:
    with pytest.raises(BoxError, match="write it like 1gbit"):
        parse_link(text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nodes": 0}, "nodes is 0, allowed is 1 to 64"),
        ({"cpus": 0.01}, "cpus is 0.01, the least is 0.05"),
        ({"mem": 100 * MIB}, "mem is 100 MiB, the least is 256 MiB"),
        ({"link": 5}, "link is 5 bit/s"),
        ({"subnet": "10.0.0.0/30"}, "has room for 1 nodes, 4 are wanted"),
        ({"subnet": "ten"}, "subnet 'ten' is not a network"),
        ({"slurm": "23.11"}, "slurm is '23.11': one of 22.05, 24.11, or nothing"),
    ],
)
def test_bad_options_state_both_numbers(values: dict[str, object], message: str) -> None:
    with pytest.raises(BoxError, match=message):
        Options(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(nodes=4, cpus=0.5), r"4 nodes x 0.5 cores = 2 cores, this machine of 2 can give 1.8: .* CPUS=0.45"),
        (Options(nodes=7, cpus=0.1), r"7 nodes x 3 GiB = 21 GiB, this machine of 23.5 GiB can give 20 GiB"),
    ],
)
def test_a_box_larger_than_the_machine_is_refused(options: Options, message: str) -> None:
    with pytest.raises(BoxError, match=message):
        machine.check_capacity(options, cores=2, mem=int(23.5 * GIB))


def test_another_release_loads_its_own_plugins() -> None:
    plugins = f"PluginDir={paths.RELEASE}/lib/slurm-wlm\n"
    other, own = Options(slurm="24.11"), Options(slurm="")
    for write in (lambda options: slurmconf.slurm_conf(options, "host"), slurmconf.slurmdbd_conf):
        assert plugins in write(other)
        assert "PluginDir" not in write(own)


def test_lock_serialises_and_removes_its_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    seen: list[str] = []

    def second() -> None:
        with lock.locked(path, timeout=5):
            seen.append("second")

    with lock.locked(path):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.2)
        seen.append("first")
    thread.join(5)
    assert seen == ["first", "second"]
    assert not path.exists()


def test_bad_values_exit_2_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", "--mem", "much"]) == 2
    assert capsys.readouterr().err == "slurm box: mem 'much' is not a size: write it like 3g or 512m\n"


def test_not_root_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cli.main(["up"]) == 2
    assert "needs root for namespaces and cgroups, this is user 1000: use sudo" in capsys.readouterr().err
