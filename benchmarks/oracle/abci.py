"""``python -m benchmarks.oracle.abci``: iterations on ABCI at 16 to 1,024 V100 from runs at 1 to 8, blind.

Writes ``abci_predictions.csv`` beside this file from ``abci_fit.csv`` and the profile ``historic/abci-v100`` alone, and
prints what was found as Markdown. ``--check`` compares with the file instead. README.md beside this explains it.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Iterator
from math import exp
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from benchmarks.oracle.whole_runs import FittedMachine, Observation, fit_whole_runs
from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.cost_model import CostModel
from hpcbench.predict.machine import Machine, StrategyOverhead, nominal_machine
from hpcbench.predict.placement import GroupPlacement, place_group
from hpcbench.predict.prediction import Prediction
from hpcbench.predict.stream_simulator import CommCall, StreamEvent, StreamTimes
from hpcbench.strategies.horovod.cost import NEGOTIATION_BYTES
from hpcbench.strategies.layer_table import LayerRow, LayerTable, read_shipped_table
from hpcbench.strategies.mesh import MESH_AXES
from hpcbench.units import format_percent

FOLDER = Path(__file__).parent
PREDICTIONS = FOLDER / "abci_predictions.csv"
COLUMNS = ("model", "strategy", "gpus", "batch_per_gpu", "iter_s", "iter_s_low", "iter_s_high")
GPUS = (16, 32, 64, 128, 256, 512, 1024)
ASKED = (
    ("ResNet-50", "data", 64),
    ("VGG16", "data", 32),
    ("ResNet-50", "data+spatial", 16),
    ("ResNet-50", "data+spatial", 64),
    ("ResNet-50", "data+filter", 16),
)
"""Model, strategy, samples a GPU."""
PER_NODE = 4
MODELS = {"ResNet-50": "resnet50", "VGG16": "vgg16"}
PRIOR = {
    # Hybrids of ChainerMN pass halos and activations through MPI and the host, and one rank reads a node's samples:
    # nobody knows how slow that is. The one run of filter cannot tell time per sample from time per step.
    "strategy.spatial.compute": 0.0,
    "strategy.spatial.step": 1.5,
    "strategy.spatial.sample": 1.5,
    "strategy.filter.compute": 0.0,
    "strategy.filter.step": 3.0,
}
STRAGGLING = 0.02
"""Of V100s in one cluster: their performance varies by 8 % on average (Sinha et al., SC 2022), here four deviations."""
SEEDS = {"spatial": StrategyOverhead(step_s=0.01, sample_s=0.001), "filter": StrategyOverhead(step_s=0.1)}


class PackedClock(CostModel):
    """``horovod`` that does not negotiate: ChainerMN packs all gradients after the backward pass."""

    def _collective(
        self, operation: str, payload_bytes: float, group: GroupPlacement, key: str | None = None, lane: str = ""
    ) -> CommCall:
        call = super()._collective(operation, payload_bytes, group, key, lane)
        return call._replace(seconds=0.0, latency_s=0.0) if payload_bytes == NEGOTIATION_BYTES else call


class HybridClock(CostModel):
    """ChainerMN's exchange: all gradients, split or not, packed and all_reduced by all after the backward pass."""

    def _collective(
        self, operation: str, payload_bytes: float, group: GroupPlacement, key: str | None = None, lane: str = ""
    ) -> CommCall:
        call = super()._collective(operation, payload_bytes, group, key, lane)
        # Only buckets are handed over without waiting for them.
        return call if key is None else call._replace(seconds=0.0, latency_s=0.0)

    def run(self, events: Iterable[StreamEvent]) -> StreamTimes:
        """The step, then the exchange."""
        busy = super().run(events)
        table = next(table for name, table in TABLES.items() if MODELS[name] == self.spec.model)
        call = super()._collective("all_reduce", table.totals().parameters * 4.0, place_group(self.spec, *MESH_AXES))
        return busy._replace(
            end_s=busy.end_s + call.seconds,
            comm_s=busy.comm_s + call.seconds,
            exposed_comm_s=busy.exposed_comm_s + call.seconds,
            latency_s=busy.latency_s + call.latency_s,
        )


def chainermn(machine: Machine, spec: RunSpec) -> CostModel:
    """``horovod`` that fuses all gradients, looking for them once, is what ChainerMN's data parallelism does."""
    return PackedClock(machine, spec) if spec.strategy == "horovod" else HybridClock(machine, spec)


class Row(NamedTuple):
    """A line of ``abci_fit.csv``, as far as it is used."""

    model: str
    strategy: str
    gpus: int
    batch_per_gpu: int
    median_s: float
    mean_s: float


def main(arguments: list[str]) -> int:
    """Exit code 1 where ``--check`` finds another file."""
    machine = fitted_machine()
    text = predictions_csv(machine)
    if arguments == ["--check"]:
        return int(not is_same(text, PREDICTIONS.read_text(encoding="utf-8")))
    PREDICTIONS.write_text(text, encoding="utf-8")
    print("\n".join([*_found(machine), "", *_table(text)]))
    return 0


def predictions_csv(machine: FittedMachine) -> str:
    """All that is asked, to the tenth of a millisecond."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(COLUMNS)
    for model, strategy, batch in ASKED:
        for gpus in GPUS:
            one = predicted(machine, model, strategy, gpus, batch)
            times = (one.step_time_s, one.interval.low, one.interval.high)
            lines.writerow([model, strategy, gpus, batch, *(f"{value:.4f}" for value in times)])
    return text.getvalue()


def is_same(left: str, right: str) -> bool:
    """Whether two such files say the same, but for what processors round differently."""
    rows = [list(csv.reader(io.StringIO(text))) for text in (left, right)]
    keys = [[row[:4] for row in one] for one in rows]
    times = [[float(cell) for row in one[1:] for cell in row[4:]] for one in rows]
    return keys[0] == keys[1] and all(abs(one - other) < 2e-3 * one for one, other in zip(*times, strict=True))


def predicted(machine: FittedMachine, model: str, strategy: str, gpus: int, batch_per_gpu: int) -> Prediction:
    """One point."""
    return machine.predict(spec_of(model, strategy, gpus, batch_per_gpu), TABLES[model])


def fitted_machine(most_gpus: int = 8) -> FittedMachine:
    """The profile's machine, fitted with the rows of at most ``most_gpus``."""
    rows = [row for row in clean_rows() if row.gpus <= most_gpus]
    observations = [
        Observation(
            spec_of(row.model, row.strategy, row.gpus, row.batch_per_gpu), TABLES[row.model], row.median_s,
            row.mean_s,
        )
        for row in rows
    ]  # fmt: skip
    return fit_whole_runs(nominal(), observations, PRIOR, chainermn)


def nominal() -> Machine:
    """ABCI by its profile. NCCL 2.3.5 knows rings only."""
    profile, _ = load_cluster("abci-v100")
    machine = nominal_machine(profile, tasks_per_node=PER_NODE)
    return replace(machine, comm=replace(machine.comm, trees=False), strategies=SEEDS, straggling=STRAGGLING)


def clean_rows() -> Iterator[Row]:
    """Measured in steady intervals (they alone have percentiles), of a model and strategy that is asked for.

    Of the others the warm-up is in the mean: an upper bound that a row of the same run without it makes needless.
    """
    asked = {(model, strategy) for model, strategy, _ in ASKED}
    with (FOLDER / "abci_fit.csv").open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            if line["iter_s_p10"] and (line["model"], line["strategy"]) in asked:
                yield Row(
                    line["model"],
                    line["strategy"],
                    int(line["gpus"]),
                    round(float(line["batch_per_gpu"])),
                    float(line["iter_s_median"]),
                    float(line["iter_s_mean"]),
                )


def spec_of(model: str, strategy: str, gpus: int, batch_per_gpu: int) -> RunSpec:
    """The run in our words."""
    spec: dict[str, Any] = {
        "model": MODELS[model],
        "dataset": "imagenet",
        "optimizer": "adam",
        "nodes": -(-gpus // PER_NODE),
        "tasks_per_node": min(gpus, PER_NODE),
    }
    if strategy == "data":
        options: dict[str, Any] = {"fusion_threshold_mb": 4096.0, "cycle_time_ms": 1e6}
        spec |= {"strategy": "horovod", "dp_degree": gpus, "batch_size": batch_per_gpu, "options": options}
    else:
        spec |= {"dp_degree": gpus // PER_NODE, "batch_size": batch_per_gpu * PER_NODE}
        if strategy == "data+filter":
            spec |= {"strategy": "filter", "tp_degree": PER_NODE}
        else:
            options = {"overlap": False, "batch_norm": "local"}
            spec |= {"strategy": "spatial", "sp_degree": PER_NODE, "options": options}
    return msgspec.convert(spec, RunSpec)


def _shipped(model: str) -> LayerTable:
    table = read_shipped_table(model, "imagenet")
    assert table is not None
    return table


def _chainer_vgg16() -> LayerTable:
    """Chainer's pools round up: 226 pixels end as 8 x 8, and the first linear layer has 32,768 inputs for 25,088."""
    table, inputs, outputs = _shipped("vgg16"), 512 * 8 * 8, 4096

    def wider(layer: LayerRow) -> LayerRow:
        if layer.input_shape != [25088]:
            return layer
        share = inputs / layer.input_shape[0]
        return replace(
            layer,
            input_shape=[inputs],
            parameters=inputs * outputs + outputs,
            forward_flops=round(layer.forward_flops * share),
            backward_flops=round(layer.backward_flops * share),
        )

    tensors = [
        one._replace(shape=[outputs, inputs]) if one.shape == [outputs, 25088] else one
        for one in table.parameter_tensors
    ]
    return replace(table, layers=[wider(layer) for layer in table.layers], parameter_tensors=tensors)


TABLES = {"ResNet-50": _shipped("resnet50"), "VGG16": _chainer_vgg16()}


def _found(machine: FittedMachine) -> list[str]:
    lines = ["| number | found / profile | 68 % | learned |", "|---|---|---|---|"]
    for one in machine.parameters:
        low, high = exp(one.log_factor - one.spread), exp(one.log_factor + one.spread)
        lines.append(
            f"| {one.name} | {exp(one.log_factor):.3g} | {low:.3g} to {high:.3g} | {format_percent(one.learned)} |"
        )
    lines += ["", "| run | measured | fitted | off | weight |", "|---|---|---|---|---|"]
    for run in machine.residuals:
        off = run.predicted_s / run.measured_s - 1
        cells = (
            run.run,
            f"{run.measured_s:.4f}",
            f"{run.predicted_s:.4f}",
            format_percent(off, 1, sign="+"),
            f"{run.weight:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    delay_ms, scatter = machine.delay_s * 1e3, machine.run_spread
    return [*lines, "", f"Delay of a node {delay_ms:.1f} ms, scatter of runs {format_percent(scatter, 1)}."]


def _table(text: str) -> list[str]:
    """Return the table of the predictions."""
    rows = list(csv.reader(io.StringIO(text)))
    return [f"| {' | '.join(row)} |" for row in (rows[0], ["---"] * len(COLUMNS), *rows[1:])]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
