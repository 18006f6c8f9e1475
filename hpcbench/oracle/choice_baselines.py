"""Constant choices of a strategy: baselines of a recommendation that predict no time.

A predictor of step times is worth nothing as a recommender where it loses to one of these."""

from __future__ import annotations

from hpcbench.oracle.scoring import PredictorResult

CHOICE_BASELINES: dict[str, tuple[str, ...]] = {"always_ddp": ("ddp",), "ddp_else_fsdp": ("ddp", "fsdp")}
"""Strategies of each baseline, the preferred one first. A baseline with several chooses only runs that fit into
memory."""


def choice_results(strategy: str, fits: bool | None) -> dict[str, PredictorResult]:
    """Return the choice of each of ``CHOICE_BASELINES`` for a run.

    Args:
        strategy: of the run.
        fits: whether the oracle predicts that it fits into memory; ``None``, unknown, counts as yes.
    """
    return {
        name: _choice_result(strategy, order, fits is False and len(order) > 1)
        for name, order in CHOICE_BASELINES.items()
    }


def _choice_result(strategy: str, order: tuple[str, ...], is_too_large: bool) -> PredictorResult:
    if strategy not in order:
        return PredictorResult(reason=f"it chooses only {' or '.join(order)}")
    if is_too_large:
        return PredictorResult(reason="it does not fit, by the oracle", fits=False)
    return PredictorResult(preference=order.index(strategy))
