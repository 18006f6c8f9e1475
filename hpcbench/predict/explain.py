"""A predicted step term by term: the seconds of each, and their sources."""

from __future__ import annotations

from math import exp
from typing import NamedTuple

from hpcbench.config.run_spec import RunSpec, config_id
from hpcbench.predict.decoder.pricing import StepTerms
from hpcbench.predict.decoder.site import SITE_FACTORS, Site, site_terms
from hpcbench.predict.fitted_decoders import PricedCommand
from hpcbench.predict.forecast import Forecast
from hpcbench.predict.prediction import BASIS_TEXTS, NotPredicted, Prediction

_TENSOR, _WIDE_TENSOR = "tensor parallel messages", "tensor parallel messages over nodes"
_TERMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "compute": ("computation of the layers", ("products", "memory-bound kernels", "attention", "host")),
    "tensor_traffic": ("tensor parallel messages", (_TENSOR, _WIDE_TENSOR)),
    "expert_traffic": ("tokens to experts and back", (_TENSOR, _WIDE_TENSOR)),
    "context_traffic": ("keys and values of a context group", (_TENSOR, _WIDE_TENSOR)),
    "shard_traffic": ("parameters of shards", ("data parallel rates", "data parallel latencies")),
    "stage_traffic": ("messages between stages", ("messages between stages",)),
    "gradient_traffic": ("gradients and gathered parameters", ("data parallel rates", "data parallel latencies")),
    "bubble": ("bubble of the pipeline", ()),
    "straggling": ("slower nodes", ()),
    "optimizer": ("optimizer", ("optimizer",)),
    "fixed": ("start of the step", ()),
}
"""Name of each term of a decoder's step, and the factors of a site that move it."""


class Term(NamedTuple):
    """A part of a step by which it is longer."""

    name: str
    seconds: float
    rests_on: str


class Explanation(NamedTuple):
    """A prediction that leaves out the results of its own configuration; its terms add up to the step."""

    prediction: Prediction
    terms: list[Term]


def explain(spec: RunSpec, forecast: Forecast) -> Explanation | NotPredicted:
    """Return the terms of a run's step, the largest first; those of no time are left out."""
    prediction = forecast.predict(spec, held_out=True)
    if isinstance(prediction, NotPredicted):
        return prediction
    if spec.workload == "command":
        priced = forecast.price_command(spec)
        if isinstance(priced, NotPredicted):
            return priced
        terms = decoder_terms(priced, forecast.site(spec.partition).without(config_id(spec)))
    else:
        terms = _training_terms(prediction)
    return Explanation(prediction, sorted((one for one in terms if one.seconds > 0), key=lambda one: -one.seconds))


def decoder_terms(priced: PricedCommand, site: Site) -> list[Term]:
    """Return the terms of a decoder's step at a site, those of no time too."""
    parts: StepTerms = site_terms(priced.work, priced.figures, site.logs)
    learned = dict(zip(SITE_FACTORS, site.logs, strict=True))
    terms = []
    for field, (name, factors) in _TERMS.items():
        notes = ["published runs"]
        if field == "expert_traffic":
            notes = ["published rates of tensor parallel messages, balanced routing"]
        if field == "compute" and priced.layout.precision != "bf16":
            notes.append(f"the device's peak in {priced.layout.precision}")
        if field == "compute" and priced.shape.experts is not None:
            notes.append("experts by their work alone")
        notes += [f"{factor} x {exp(learned[factor]):.2f} by runs here" for factor in factors if learned[factor]]
        if learned["whole step"]:
            notes.append(f"whole step x {exp(learned['whole step']):.2f}")
        terms.append(Term(name, getattr(parts, field), ", ".join(notes)))
    return terms


def _training_terms(prediction: Prediction) -> list[Term]:
    basis = prediction.rests_on
    source = BASIS_TEXTS[basis.base or basis.kind]
    if basis.counts:
        source += f", x {basis.factor:.2f} by measured neighbours"
    parts = {
        "computation": prediction.compute_s, "messages that nothing hides": prediction.exposed_comm_s,
        "bubble of the pipeline": prediction.bubble_fraction * prediction.step_time_s,
        "slower ranks": prediction.straggler_s,
    }  # fmt: skip
    return [Term(name, seconds, source) for name, seconds in parts.items()]
