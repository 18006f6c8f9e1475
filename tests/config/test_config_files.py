from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpcbench.config.cluster_profile import load_cluster, load_cluster_file
from hpcbench.config.sweep_loader import Sweep
from hpcbench.config.toml_tables import TomlSource
from hpcbench.errors import ConfigError, ConfigErrors, HpcbenchError

Write = Callable[[str], Sweep]


def test_axes_keep_the_order_of_the_file(write_sweep: Write) -> None:
    sweep = write_sweep(
        'name = "s"\n[fixed]\nmodel = "m"\n[grid]\nsteps = [1]\nbatch_size = [1, 2]\n[grid.options]\nbucket_cap_mb = [1, 25]\n'
    )
    assert [list(axis.steps[0]) for axis in sweep.axes] == [
        [("steps",)],
        [("batch_size",)],
        [("options", "bucket_cap_mb")],
    ]
    assert sweep.fixed == {("model",): "m"}


def test_units_and_numbers_mean_the_same(write_sweep: Write) -> None:
    assert write_sweep('name = "s"\nfixed.time_limit_min = "2 h"').fixed["time_limit_min",] == 120.0
    assert write_sweep('name = "s"\nfixed.time_limit_min = 120').fixed["time_limit_min",] == 120.0


def test_all_mistakes_at_once_each_with_its_line(write_sweep: Write) -> None:
    with pytest.raises(ConfigErrors) as caught:
        write_sweep(
            'name = "no good"\n\n[fixed]\nbatch_sise = 3\nlearning_rate = "fast"\n\n[grid]\nnodes = []\nsteps = [\n  1,\n  "2",\n]\n'
        )
    lines = sorted(str(problem.where).rpartition(":")[2] for problem in caught.value.problems)
    assert lines == ["1", "4", "5", "8", "9"]
    assert "did you mean 'batch_size'?" in str(caught.value)
    assert "'fast'" in str(caught.value)


def test_set_twice_is_refused(write_sweep: Write) -> None:
    with pytest.raises(ConfigErrors, match=r"sweep.toml:5: nodes is set in \[fixed\] and in \[grid\]"):
        write_sweep('name = "s"\n[fixed]\nnodes = 1\n[grid]\nnodes = [1, 2]\n')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", r"sweep.toml:1: not valid TOML"),
        ("[grid]\nnodes=[1]", "name is missing"),
        ("name = 3", "valid string, not 3"),
    ],
)
def test_broken_sweep_files_are_refused_with_their_line(write_sweep: Write, text: str, message: str) -> None:
    with pytest.raises(HpcbenchError, match=message):
        write_sweep(text)


def test_absent_or_non_utf8_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the file: No such file"):
        load_cluster_file(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "caf\xe9"')
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_cluster_file(tmp_path / "latin.toml")


TEXT = """a = 1
[table]
key = [
  1,
  2,
]
"quoted key".inner = 2
[[list]]
x = 1
[[list]]
x = 2
[list.sub]
y = 3
"""


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("a",), 1),
        (("table",), 2),
        (("table", "key", 1), 3),
        (("table", "quoted key", "inner"), 7),
        (("list", 1, "x"), 11),
        (("list", 1, "sub", "y"), 13),
        (("absent",), None),
        (("table", "absent"), 2),
    ],
)
def test_a_key_path_gives_its_line_in_the_file(path: tuple[str | int, ...], line: int | None) -> None:
    assert TomlSource(Path("x.toml"), TEXT).line(path) == line


def test_values_of_a_parameter_are_distinguished_by_type(write_sweep: Write) -> None:
    sweep = write_sweep('name = "s"\n[grid.options]\nx = [true, 1, 1.0]\n[[include]]\noptions.x = 1\n')
    assert [repr(value) for value in sweep.values("options", "x")] == ["True", "1", "1.0"]


@pytest.mark.parametrize("name", ["local", "slurmbox", "generic-slurm"])
def test_shipped_profiles_load_under_their_file_name(name: str) -> None:
    profile, _ = load_cluster(name)
    assert profile.name == name


def test_unknown_cluster_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'slurmbox'"):
        load_cluster("slurmbocks")
    with pytest.raises(ConfigError, match="unknown cluster"):
        load_cluster("no name")
    with pytest.raises(ConfigError, match="no cluster profile"):
        load_cluster("../secret")


def profile(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_units_in_profiles_are_converted_to_base_units(tmp_path: Path) -> None:
    path = profile(
        tmp_path,
        'name = "mine"\n[links.inter_node]\nlatency_s = "10 us"\nbandwidth_bytes_per_s = "200 Gbit/s"\n'
        '[devices.a100]\nmemory_bytes = "40 GB"\npeak_flops_per_s = { bf16 = "312 TFLOP/s" }\n',
    )
    loaded, _ = load_cluster_file(path)
    link = loaded.links.inter_node
    assert link is not None
    assert link.latency_s == pytest.approx(1e-5)
    assert (link.bandwidth_bytes_per_s, link.mark) == (25e9, "nominal")
    assert loaded.devices["a100"].peak_flops_per_s == {"bf16": 312e12}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "other"', r"mine.toml:1: name = 'other', but the file is called mine.toml"),
        (
            'name = "mine"\n[partitions.gpu]\nmax_node = 3',
            r"mine.toml:3: unknown key 'max_node' in \[partitions.gpu\]\n.*'max_nodes'",
        ),
        ('name = "mine"\ndefault_partition = "gpu"', "default_partition = 'gpu' is not among the partitions: none"),
        (
            'name = "mine"\n[links.intra_node]\nlatency_s = "10 parsecs"\nbandwidth_bytes_per_s=1',
            r"mine.toml:3: .*is not a duration",
        ),
        ('name = "mine"\n[env]\n"A B" = "x"', r"mine.toml:3: env"),
        ('name = "mine"\naccount = "a\\nb"', r"mine.toml:2: account"),
    ],
)
def test_invalid_profiles_are_refused_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(HpcbenchError, match=message):
        load_cluster_file(profile(tmp_path, text))


def test_partition_overrides_the_node(tmp_path: Path) -> None:
    path = profile(
        tmp_path, 'name = "mine"\n[node]\ncores = 64\ndevices = 4\n[partitions.fat]\nnode = { devices = 8 }\n'
    )
    loaded, _ = load_cluster_file(path)
    assert (
        loaded.partition("fat").node.cores,
        loaded.partition("fat").node.devices,
        loaded.partition(None).node.devices,
    ) == (64, 8, 4)
