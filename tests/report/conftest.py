"""One tree of planted results for all that only read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.planted_results import write_planted


@pytest.fixture(scope="session")
def planted_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("planted")
    write_planted(root / "made-up")
    return root
