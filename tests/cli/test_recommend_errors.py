"""Requests to ``recommend`` that lack something, or have a wrong name."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from hpcbench.cli.main import cli
from hpcbench.errors import HpcbenchError


def recommend(tmp_path: Path, *arguments: str) -> None:
    asked = ["recommend", *arguments, "--cluster", "h100-80gb-ib", "--results", str(tmp_path)]
    CliRunner().invoke(cli, asked, catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "llama70b", "--dataset", "tokens"], "did you mean 'llama_70b'?"),
        (["--model", "deepseekv3", "--dataset", "tokens"], "did you mean 'deepseek_v3'?"),
        (["--model", "llama_70b"], "option --dataset is missing"),
        (["--model", "llama70b"], "option --dataset is missing"),
        (["--model", "llama_70b", "--dataset", "tokens", "--partition", "none"], "unknown partition 'none'"),
    ],
)
def test_layouts_and_unknown_models_ask_for_no_batch_size(tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(HpcbenchError) as caught:
        recommend(tmp_path, *arguments)
    assert message in str(caught.value)
    assert "batch" not in str(caught.value)


@pytest.mark.parametrize("model", [[], ["--model", "resnet18"], ["--model", "mine:net"]])
def test_a_missing_batch_size_is_named_beside_other_missing_options(tmp_path: Path, model: list[str]) -> None:
    with pytest.raises(HpcbenchError) as caught:
        recommend(tmp_path, *model)
    text = str(caught.value)
    assert "option --dataset is missing" in text
    assert "--batch-size or --global-batch-size: neither is given\n  --batch-size is per replica" in text
    assert "a number" not in text
