from __future__ import annotations

import pytest

from hpcbench import units


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("200 Gbit/s", "rate", 25e9),
        ("1 Gbps", "rate", 125e6),
        ("300 GB/s", "rate", 300e9),
        ("94 GiB", "size", 94 * 2**30),
        ("40 GB", "size", 40e9),
        ("1.5 us", "time", 1.5e-6),
        ("30 min", "time", 1800.0),
        ("2h", "time", 7200.0),
        ("312 TFLOP/s", "computing speed", 312e12),
        ("2-00:00:00", "time", 172_800.0),
        ("1-12", "time", 129_600.0),
        ("1-00", "time", 86_400.0),
        ("1-12:30", "time", 131_400.0),
        ("12:00:00", "time", 43_200.0),
        ("512G", "size", 512 * 2**30),
        ("500000M", "size", 500_000 * 2**20),
    ],
)
def test_a_quantity_with_a_unit_is_parsed_to_base_units(text: str, kind: str, value: float) -> None:
    assert units.parse_quantity(text, kind) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("200", "rate"),
        ("200 Gbit", "rate"),
        ("fast", "time"),
        ("1.2.3 s", "time"),
        ("-1 s", "time"),
        ("1e999 s", "time"),
        ("", "size"),
        ("12:00", "time"),
        ("512g", "size"),
    ],
)
def test_an_invalid_quantity_is_refused_with_an_example(text: str, kind: str) -> None:
    with pytest.raises(ValueError, match="for instance"):
        units.parse_quantity(text, kind)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (300 * 2**20, "300 MiB"), (2**41, "2.0 TiB")]
)
def test_bytes_are_shown_in_binary_units(count: int, text: str) -> None:
    assert units.format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (3.2e-8, "32.0 ns"),
        (4.5e-5, "45.0 µs"),
        (0.0123, "12.3 ms"),
        (1.5, "1.50 s"),
        (61, "1m01s"),
        (3661, "1h01m"),
        (-0.0123, "-12.3 ms"),
    ],
)
def test_seconds_are_shown_in_a_fitting_unit(seconds: float, text: str) -> None:
    assert units.format_seconds(seconds) == text


def test_rates_are_shown_with_three_digits() -> None:
    assert [units.format_rate(value) for value in (1.234, 99.94, 1234, 12345, 2.5e6)] == [
        "1.23",
        "99.9",
        "1234",
        "12.3 k",
        "2.50 M",
    ]


def test_slurm_time_rounds_up() -> None:
    assert units.format_slurm_time(5400) == "0-01:30:00"
    assert units.format_slurm_time(86400 + 0.2) == "1-00:00:01"


@pytest.mark.parametrize("text", ["120", "90:00", "12", "1-", "-12", "1-12:5", "1-1234"])
def test_a_time_without_a_clear_unit_is_refused_with_every_spelling(text: str) -> None:
    spellings = "'30 min' or '5 us', or as SLURM: D-HH, D-HH:MM, D-HH:MM:SS or HH:MM:SS"
    with pytest.raises(ValueError, match=f"^'{text}' is not a duration: write a number and a unit, .* {spellings}$"):
        units.parse_quantity(text, "time")
