from __future__ import annotations

import os

import pytest

from hpcbench.errors import WorkerError
from hpcbench.worker.distributed.rendezvous import (
    NetworkInterface,
    choose_interface,
    interface_holding,
    list_interfaces,
    reachable_address,
    set_interface_variables,
)

LO = NetworkInterface("lo", ["127.0.0.1", "::1"])
DOCKER = NetworkInterface("docker0", ["172.17.0.1"])
ETH = NetworkInterface("eth0", ["10.0.0.5"])
IB = NetworkInterface("ib0", ["10.1.0.5"])
IB1 = NetworkInterface("ib1", ["10.1.1.5"])
V6 = NetworkInterface("eth0", ["fd00::5"])

TABLE = [
    ([LO, ETH], None, {}, ("eth0", "10.0.0.5")),
    ([LO, DOCKER, ETH], None, {}, ("eth0", "10.0.0.5")),
    ([LO, DOCKER], None, {}, ("docker0", "172.17.0.1")),
    ([LO, ETH, IB], None, {"10.1.0.5": "host"}, ("ib0", "10.1.0.5")),
    ([LO, ETH, IB], None, {"127.0.1.1": "host"}, ("eth0", "10.0.0.5")),
    ([LO, ETH, IB, IB1], "ib1", {}, ("ib1", "10.1.1.5")),
    ([LO, ETH, IB, IB1], "ib", {}, ("ib0", "10.1.0.5")),
    ([LO, ETH, IB1, IB], "ib0", {}, ("ib0", "10.1.0.5")),
    ([LO, V6], None, {}, ("eth0", "fd00::5")),
    ([LO], None, {}, None),
]


@pytest.mark.parametrize(("present", "wanted", "names", "expected"), TABLE)
def test_the_rendezvous_takes_the_chosen_interface(
    present: list[NetworkInterface], wanted: str | None, names: dict[str, str], expected: tuple[str, str] | None
) -> None:
    assert choose_interface(present, wanted, names) == expected


def test_an_interface_that_is_absent_is_named_with_those_that_are_there() -> None:
    with pytest.raises(WorkerError, match=r"'hsn0'.* has: lo 127\.0\.0\.1, eth0 10\.0\.0\.5") as caught:
        choose_interface([LO, ETH], "hsn0")
    assert "interface" in (caught.value.hint or "")
    assert caught.value.status == "unsupported"


def test_one_node_communicates_over_loopback() -> None:
    assert reachable_address(True, "ib0", "i") == ("lo", "127.0.0.1")


def test_a_host_suffix_without_an_address_is_refused() -> None:
    with pytest.raises(WorkerError, match="host_suffix"):
        reachable_address(False, None, "-no-such-network")


def test_this_machine_has_loopback() -> None:
    assert interface_holding("127.0.0.1", list_interfaces()) is not None


@pytest.mark.parametrize(
    ("named", "single_node", "nccl"), [(True, False, "=bond0"), (False, False, None), (True, True, None)]
)
def test_nccl_takes_the_interface_alone_and_none_that_begins_with_its_name(
    monkeypatch: pytest.MonkeyPatch, named: bool, single_node: bool, nccl: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {})
    set_interface_variables("bond0", named, single_node)
    # gloo compares whole names, and has no "=".
    assert (os.environ.get("NCCL_SOCKET_IFNAME"), os.environ["GLOO_SOCKET_IFNAME"]) == (nccl, "bond0")
    os.environ["NCCL_SOCKET_IFNAME"] = "eth"
    set_interface_variables("bond0", named, single_node)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth"
