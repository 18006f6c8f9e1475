from __future__ import annotations

import pytest

from hpcbench.results.anonymize import Anonymizer, expand_host_list


@pytest.fixture
def anonymiser() -> Anonymizer:
    anonymiser = Anonymizer()
    anonymiser.learn_user("alice", "/p/home/jusers/alice", "Alice Example")
    anonymiser.learn_user("root", "/root")
    anonymiser.learn_hosts("jrc[0101-0102].hpc.example.org,login1,n1")
    anonymiser.learn_account("prj42")
    anonymiser.learn_folder("tree", "/p/scratch/prj42/alice/results")
    return anonymiser


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("alice ALICE ~alice alice_x alice@login1", "user-1 user-1 ~user-1 user-1_x user-1@node-3"),
        ("malice alice2 alicexample", "malice alice2 alicexample"),
        ("by Alice Example", "by user-1"),
        ("/p/home/jusers/alice/x /home/alice/y", "/home/user-1/x /home/user-1/y"),
        ("/root/x of root in /x/root", "/home/user-2/x of root in /x/root"),
        ("/p/scratch/prj42/alice/results/c/runs", "/tree-1/c/runs"),
        ("/p/scratch/prj42/alice/results2", "/p/scratch/account-1/user-1/results2"),
        ("jrc0101 JRC0102.hpc.example.org jrc0101i jrc0101-ib0", "node-1 node-2 node-1 node-1-ib0"),
        ("jrc[0101-0102,0101] n[1-1]", "node-1,node-2,node-1 node-4"),
        ("jrc0999, jrc0999.hpc.example.org", "node-5, node-5"),
        ("login7.hpc.example.org in hpc.example.org", "node-5 in domain-1"),
        ("x[0] foo[1-3] jrc01011 n12 login", "x[0] foo[1-3] jrc01011 n12 login"),
        ("10.0.0.1:29500 10.0.0.1. 10.0.0.2", "ip-1:29500 ip-1. ip-2"),
        ("10.0.0.300 1.2.3 127.0.0.1 0.0.0.0 1.2.3.4.5", "10.0.0.300 1.2.3 127.0.0.1 0.0.0.0 1.2.3.4.5"),
        ("fe80::1%eth0 [2001:db8::5]:80 2001:DB8:0::5", "ip-1%eth0 [ip-2]:80 ip-2"),
        ("std::bad_alloc c10::Error at 12:34:56 ::1 ::", "std::bad_alloc c10::Error at 12:34:56 ::1 ::"),
        ("aa:bb:cc:dd:ee:ff AA-BB-CC-DD-EE-FF", "mac-1 mac-1"),
        ("GPU-12345678-1234-1234-1234-123456789abc", "gpu-1"),
        ("belongs to uid 1000, gid 100; uid=1000", "belongs to uid 1, gid 1; uid=1"),
        ("enxaabbccddeeff AA:BB:CC:DD:EE:FF enp1s0 enx12", "enx-mac-1 mac-1 enp1s0 enx12"),
        ("0000:3b:00.0 00000000:3B:00.0", "0000:3b:00.0 00000000:3B:00.0"),
        ("bob.b@mail.example.org", "mail-1"),
        ("prj42 PRJ42 prj421", "account-1 account-1 prj421"),
        ("localhost on ib0", "localhost on ib0"),
    ],
)
def test_names_in_a_text_are_replaced_consistently(anonymiser: Anonymizer, text: str, expected: str) -> None:
    assert anonymiser.text(text) == expected
    assert anonymiser.text(text) == expected


def test_names_are_found_in_documents_and_scripts() -> None:
    anonymiser = Anonymizer()
    document = {
        "host": "gpu07", "executable": "/home/carol/venv/bin/python", "tree": "/data/groups/x/results/c",
        "job": {"account": "prj7", "nodelist": "gpu[07-08]"}, "gpu08": ["on gpu08 by carol"], "status": "ok",
    }  # fmt: skip
    anonymiser.learn_document(document)
    anonymiser.learn_text("#SBATCH --account=prj8\n#SBATCH -A 'prj9'\n#SBATCH --nodelist=fat[1-2]\n")
    assert anonymiser.document(document) == {
        "host": "node-1", "executable": "/home/user-1/venv/bin/python", "tree": "/tree-1/c",
        "job": {"account": "account-1", "nodelist": "node-1,node-2"}, "node-2": ["on node-2 by user-1"], "status": "ok",
    }  # fmt: skip
    assert anonymiser.text("prj8 prj9 fat2") == "account-2 account-3 node-4"


def test_job_and_machine_of_a_result_are_anonymised() -> None:
    uuid = "GPU-12345678-1234-1234-1234-123456789abc"
    document = {
        "provenance": {
            "job": {"reservation": "alices-course", "step_nodelist": "gpu[07-08]", "partition": "booster"},
            "container": "/p/project1/secret/images/torch.sif",
            "gpus": [{"uuid": uuid, "pci": "00000000:3B:00.0", "numa_node": 0}],
            "interfaces": [{"name": "enxaabbccddeeff", "mtu_bytes": 1500}], "infiniband": ["mlx5_0/1 InfiniBand, ACTIVE"],
            "hosts": ["gpu07"],
        },
        "warnings": ["a slow rank: rank 1 on gpu08 takes 2.00 x as long", "kernel 5.14 on gpu07", "of alices-course"],
    }  # fmt: skip
    anonymiser = Anonymizer()
    anonymiser.learn_document(document)
    assert anonymiser.document(document) == {
        "provenance": {
            "job": {"reservation": "reservation-1", "step_nodelist": "node-1,node-2", "partition": "booster"},
            "container": "/images-1/torch.sif",
            "gpus": [{"uuid": "gpu-1", "pci": "00000000:3B:00.0", "numa_node": 0}],
            "interfaces": [{"name": "enx-mac-1", "mtu_bytes": 1500}], "infiniband": ["mlx5_0/1 InfiniBand, ACTIVE"],
            "hosts": ["node-1"],
        },
        "warnings": ["a slow rank: rank 1 on node-2 takes 2.00 x as long", "kernel 5.14 on node-1", "of reservation-1"],
    }  # fmt: skip


def test_own_vocabulary_stays_even_if_a_user_has_such_a_name() -> None:
    anonymiser = Anonymizer()
    for name in ("single", "host", "spec", "ok"):
        anonymiser.learn_user(name)
    document = {"spec": {"strategy": "single", "host": "single"}, "status": "ok"}
    assert anonymiser.document(document) == {"spec": {"strategy": "single", "host": "user-1"}, "status": "ok"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("a", ["a"]),
        ("n[01-03,7],login", ["n01", "n02", "n03", "n7", "login"]),
        ("r1n[1-2]-ib.x", ["r1n1-ib.x", "r1n2-ib.x"]),
        ("n[2-1]", []),
        ("n[x]", ["n[x]"]),
    ],
)
def test_a_host_list_expands_to_its_names(text: str, names: list[str]) -> None:
    assert expand_host_list(text) == names


def test_a_list_of_hosts_has_an_end() -> None:
    assert len(expand_host_list("n[0-99999999999999]", limit=1000)) == 1000


def test_the_data_folder_has_a_stand_in() -> None:
    anonymiser = Anonymizer()
    document = {
        "provenance": {"data": {"data_folder": "/lustre/groups/lab/data", "loader_workers": 3}},
        "error": {"hint": "hpcbench data make cifar10 --folder /lustre/groups/lab/data"},
    }
    anonymiser.learn_document(document)
    shown = anonymiser.document(document)
    assert shown["provenance"]["data"] == {"data_folder": "/data-1", "loader_workers": 3}
    assert shown["error"]["hint"] == "hpcbench data make cifar10 --folder /data-1"
