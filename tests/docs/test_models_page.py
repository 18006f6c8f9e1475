"""The catalogue states the parameters of the models that torch builds, and their sources have a row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.make_reference import COUNTED_ON
from hpcbench.worker.models.build import build_meta_model, count_parameters
from hpcbench.workloads.models import MODELS
from tests.worker.helpers import make_spec

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROWS = re.findall(
    r"^\| `(\w+)` \| .*? \| ([\d,]+) \| (\w+) from \d+ \|",
    (DOCS / "catalog.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)
SOURCES = re.findall(r"^\| (`.*?`) \| .* \|$", (DOCS / "models.md").read_text(encoding="utf-8"), re.MULTILINE)
TIED = {
    "gpt": "7,357,312", "gpt_125m": "125,226,240", "gpt_350m": "355,871,744", "gpt_760m": "760,300,032",
    "gpt_1_3b": "1,315,723,264", "gpt_2_7b": "2,651,553,280", "gpt_6_7b": "6,658,404,352", "gpt_13b": "12,853,386,240",
    "gpt_17b": "17,176,845,728",
}  # fmt: skip
"""The publications' counts, with one weight for the embedding and the output layer."""


def count(model: str, kind: str, **options: bool) -> str:
    spec = make_spec(model=model, dataset=COUNTED_ON[kind], model_options=options)
    return f"{count_parameters(build_meta_model(spec)):,}"


def test_every_model_has_a_row() -> None:
    assert [row[0] for row in ROWS] == list(MODELS)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_states_the_models_parameters(row: tuple[str, str, str]) -> None:
    model, stated, kind = row
    assert count(model, kind) == stated


@pytest.mark.parametrize("model", TIED)
def test_tied_weights_give_the_published_number_of_parameters(model: str) -> None:
    assert count(model, "tokens", tied=True) == TIED[model]


def test_every_model_has_one_source() -> None:
    """A row names a model, several, a first and a last one (in the catalogue's order), or a prefix with a star."""
    named = []
    for cell in SOURCES:
        words = re.findall(r"`([\w*]+)`", cell)
        if " to " in cell:
            first, last = map(list(MODELS).index, words)
            named += list(MODELS)[first : last + 1]
        else:
            named += [key for word in words for key in MODELS if re.fullmatch(word.replace("*", r"\w+"), key)]
    assert sorted(named) == sorted(MODELS)
