"""The oracle's memory is within a tenth of the live bytes of dry runs, for all families and up to 1,024 ranks."""

from __future__ import annotations

import pytest

from tests.distributed.peaks import CASES, PeakCase, peaks_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.spec.strategy}-{case.spec.model}-{case.spec.ranks}")
def test_the_predicted_peak_is_that_of_a_dry_run(case: PeakCase) -> None:
    dry_run_bytes, oracle_bytes, _ = peaks_of(case)
    assert dry_run_bytes == pytest.approx(oracle_bytes, rel=0.1)
