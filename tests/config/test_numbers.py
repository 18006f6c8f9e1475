"""Numbers that TOML holds and JSON, torch or SLURM do not, in every numeric field; files that are no UTF-8 text."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from hpcbench.config.cluster_profile import ClusterProfile, UserConfig, load_cluster_file
from hpcbench.config.sweep_file import SweepFile
from hpcbench.config.sweep_loader import expand_sweep, load_sweep
from hpcbench.config.toml_tables import read_toml, validate_table
from hpcbench.errors import ConfigError, HpcbenchError

IMPOSSIBLE = [
    "inf", "-inf", "nan", "+nan", "1e400", "9223372036854775808", "-9223372036854775809", str(2**70), "1e300",
    "0x" + "f" * 5000, "1979-05-27", "07:32:00",
]  # fmt: skip


def numeric_keys(kind: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the path of each field below ``kind`` that may be a number, with example keys for tables and lists."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            yield from numeric_keys(field.annotation, (*path, field.alias or name))
        return
    arguments = get_args(kind)
    if kind in (int, float):
        yield path
    elif getattr(kind, "__origin__", None) is dict:
        yield from numeric_keys(arguments[1], (*path, "fp32" if "peak" in path[-1] else "x"))
    elif getattr(kind, "__origin__", None) is list:
        yield from numeric_keys(arguments[0], (*path, 0))
    else:
        for argument in arguments:
            yield from numeric_keys(argument, path)


def toml_of(path: tuple[Any, ...], value: str) -> str:
    """One line of TOML that sets the key at ``path``."""
    for step in reversed(path[1:]):
        value = f"[{value}]" if step == 0 else f"{{ {step} = {value} }}"
    return f"{path[0]} = {value}"


FIELDS = [(model, path) for model in (SweepFile, ClusterProfile) for path in dict.fromkeys(numeric_keys(model))]


def test_the_walk_finds_the_fields() -> None:
    paths = [path for _, path in FIELDS]
    assert len(paths) > 150
    for path in [
        ("fixed", "learning_rate"), ("grid", "steps", 0), ("zip", 0, "batch_size", 0), ("include", 0, "options", "x"),
        ("submit", "seed"), ("scaling", "nodes", 0), ("repeats",), ("links", "inter_node", "latency_s"),
        ("partitions", "x", "node", "memory_bytes"), ("devices", "x", "peak_flops_per_s", "fp32"), ("directives", "x"),
        ("partitions", "x", "max_time_by_nodes", 0, "max_time_min"), ("scheduler", "poll_s"), ("time_limit_min",),
    ]:  # fmt: skip
        assert path in paths


@pytest.mark.parametrize("value", IMPOSSIBLE)
def test_a_number_that_cannot_be_kept_is_refused_in_every_field(tmp_path: Path, value: str) -> None:
    file = tmp_path / "f.toml"
    for model, path in FIELDS:
        file.write_text(f'name = "f"\n\n{toml_of(path, value)}\n')
        with pytest.raises(HpcbenchError) as caught:
            validate_table(model, *read_toml(file))
        assert f"{file}:3: " in str(caught.value), path


@pytest.mark.parametrize("value", ["true", "false"])
def test_a_truth_value_is_no_number(tmp_path: Path, value: str) -> None:
    file = tmp_path / "f.toml"
    # Options of strategies, parameters of commands and directives may be true or false.
    for model, path in FIELDS:
        if not {"options", "model_options", "parameters", "directives"} & set(path):
            file.write_text(f'name = "f"\n\n{toml_of(path, value)}\n')
            with pytest.raises(HpcbenchError) as caught:
                validate_table(model, *read_toml(file))
            assert f"{file}:3: " in str(caught.value), path


@pytest.mark.parametrize("text", ["inf s", "nan s", "1e999 s", "1e300 s", "1e17 d", "-1 s"])
@pytest.mark.parametrize("key", ["time_limit_min", "scheduler.poll_s", "scheduler.retry_s", "network.wait_s"])
def test_a_time_that_no_clock_holds_is_refused(tmp_path: Path, key: str, text: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f'name = "c"\n{key} = "{text}"\n')
    with pytest.raises(HpcbenchError, match=r"c\.toml:2: "):
        load_cluster_file(file)


@pytest.mark.parametrize("unit", ["GiB", "B/s", "FLOP/s"])
@pytest.mark.parametrize("number", ["inf", "1e999", "1e40"])
def test_a_quantity_beyond_64_bits_is_refused_with_the_limit(tmp_path: Path, unit: str, number: str) -> None:
    keys = {"GiB": "memory_bytes", "B/s": "memory_bandwidth_bytes_per_s", "FLOP/s": "peak_flops_per_s.fp32"}
    file = tmp_path / "c.toml"
    file.write_text(f'name = "c"\n[devices.x]\n{keys[unit]} = "{number} {unit}"\n')
    with pytest.raises(HpcbenchError) as caught:
        load_cluster_file(file)
    assert f"{file}:3: " in str(caught.value)
    assert f"'{number} {unit}'" in str(caught.value)
    assert number == "inf" or "at most 9.22e+18 " in str(caught.value)


@pytest.mark.parametrize(
    "setting", ["learning_rate=inf", "grid.weight_decay=0,nan", "options.x=1e400", "steps=99999999999999999999"]
)
def test_an_override_that_cannot_be_kept_is_refused_with_its_text(tmp_path: Path, setting: str) -> None:
    (tmp_path / "s.toml").write_text('name = "s"\n')
    with pytest.raises(HpcbenchError) as caught:
        load_sweep(tmp_path / "s.toml", [setting])
    assert str(caught.value).startswith(f"--set {setting}: ")


@pytest.mark.parametrize("expression", ["10 ** 18 * 10 ** 18", "-(10.0 ** 60)"])
@pytest.mark.parametrize("name", ["steps", "options.x", "learning_rate"])
def test_a_derived_number_that_cannot_be_kept_is_refused(tmp_path: Path, name: str, expression: str) -> None:
    (tmp_path / "s.toml").write_text(f'name = "s"\n[derive]\n"{name}" = "{expression}"\n')
    with pytest.raises(ConfigError, match=rf"s\.toml:3: derive: {name}: a number from "):
        list(expand_sweep(load_sweep(tmp_path / "s.toml")))


def test_large_numbers_that_have_a_meaning_are_kept(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(
        'name = "s"\n[fixed]\nseed = 4611686018427387904\nsteps = 2147483647\nlearning_rate = 1e-300\n'
    )
    fixed = load_sweep(tmp_path / "s.toml").fixed
    assert fixed == {("seed",): 2**62, ("steps",): 2**31 - 1, ("learning_rate",): 1e-300}


GOOD_TEXT = 'name = "c"\ndescription = "Zürich"\n'


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path: Path, ending: str) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(codecs.BOM_UTF8 + GOOD_TEXT.replace("\n", ending).encode())
    assert load_cluster_file(file)[0].description == "Zürich"
    file.write_bytes(codecs.BOM_UTF8 + (GOOD_TEXT + "nodes = 3\n").replace("\n", ending).encode())
    with pytest.raises(HpcbenchError, match=r"c\.toml:3: unknown key 'nodes'"):
        load_cluster_file(file)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (GOOD_TEXT.encode("utf-16"), "c.toml: UTF-16 or UTF-32 text\n  save it as UTF-8"),
        (GOOD_TEXT.encode("utf-32"), "c.toml: UTF-16 or UTF-32 text\n  save it as UTF-8"),
        (codecs.BOM_UTF16_BE + GOOD_TEXT.encode("utf-16-be"), "c.toml: UTF-16 or UTF-32 text"),
        (b'name = "c"\nx = "\0"\n', "c.toml:2: not valid TOML: a NUL byte in line 2: this is UTF-16, or no text"),
        ('name = "c"\n'.encode("utf-16-le"), "a NUL byte in line 1: this is UTF-16, or no text"),
        (GOOD_TEXT.encode("latin-1"), "c.toml:2: not UTF-8 text: byte 0xfc at position 27\n  save it as UTF-8"),
        (GOOD_TEXT.replace("\n", "\r").encode(), "c.toml:1: not valid TOML: lines end with CR alone: end them with LF"),
        (b'name = "c"\n\xc2\xa0date = "1"\n', "column 1 has U+00A0, NO-BREAK SPACE"),
        (b'name = "c"\n\xef\xbb\xbfdate = "1"\n', "column 1 has U+FEFF, ZERO WIDTH NO-BREAK SPACE"),
        ("name = \u201cc\u201d\n".encode(), "column 8 has U+201C, LEFT DOUBLE QUOTATION MARK"),
        (b"x = " + b"[" * 100_000, "c.toml"),
        (b"x = " + b"9" * 10_000, "c.toml"),
        (b"", "c.toml: name is missing"),
    ],
)
def test_a_file_that_is_no_utf8_text_is_named_by_what_it_is(tmp_path: Path, data: bytes, message: str) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(data)
    for model in (ClusterProfile, SweepFile):
        with pytest.raises(HpcbenchError) as caught:
            validate_table(model, *read_toml(file))
        assert message in str(caught.value)


def test_lines_are_those_of_an_editor_although_a_comment_has_other_separators(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('name = "c"\n# a\u2028b\x85c\nnodes = 3\n', encoding="utf-8")
    with pytest.raises(HpcbenchError, match=r"c\.toml:3: unknown key 'nodes'"):
        load_cluster_file(file)


def test_the_users_configuration_is_read_with_a_byte_order_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpcbench.config.cluster_profile import load_user_config

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "hpcbench").mkdir()
    (tmp_path / "hpcbench" / "config.toml").write_bytes(codecs.BOM_UTF8 + b'[accounts]\nc = "me"\n')
    assert load_user_config() == UserConfig(accounts={"c": "me"})
