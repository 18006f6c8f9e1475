"""The published runs of ``megatron.toml`` in this project's words: machine, specification, one rank's plan."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, Literal

import msgspec
import tomli

from benchmarks.oracle.megatron_run import MegatronRun
from benchmarks.oracle.megatron_table import TOKENS, VOCABULARY, Gpt, table_of
from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.collective_formulas import GroupLinks, HockneyLink, collective_s
from hpcbench.predict.kernel_prices import FORWARD, Kernel, wave_efficiency
from hpcbench.predict.machine import Machine, nominal_machine
from hpcbench.predict.message_prices import MeasuredMessage
from hpcbench.strategies.traffic import MessageShape

Recompute = Literal["none", "full", "selective"]
"""Nothing; all blocks; the inner part of attention, with sequence parallelism."""

_DATA = Path(__file__).with_name("megatron.toml")
_DEVICES_OF_NODE = 8


class Published(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run with what was published of its time."""

    name: str
    source: str
    layers: int
    width: int
    heads: int
    tp: int
    pp: int
    dp: int
    batch: int
    micro_batch: int
    interleaving: int = 1
    overlaps: bool = False
    """Gradients are summed by torch's DDP, while others are made."""
    seen: bool = False
    """Looked at while the benchmark was written."""
    full_s: float | None = None
    selective_s: float | None = None
    full_mfu: float | None = None
    selective_mfu: float | None = None
    full_flops_per_s: float | None = None

    @property
    def devices(self) -> int:
        """Return the devices of the whole run."""
        return self.tp * self.pp * self.dp

    def model_flops(self) -> float:
        """Return the FLOPs of an iteration without recomputation (Korthikanti et al. 2022, equation 7)."""
        return self._flops(passes=3)

    def hardware_flops(self) -> float:
        """Return the FLOPs with recomputed blocks (Narayanan et al. 2021, equation 3)."""
        return self._flops(passes=4)

    def _flops(self, passes: int) -> float:
        numbers = self.batch * TOKENS * self.width
        blocks = passes * self.layers * (24 * numbers * self.width + 4 * numbers * TOKENS)
        return blocks + 3 * 2 * numbers * VOCABULARY

    def published_s(self, recompute: Recompute, peak_flops_per_s: float) -> float | None:
        """The iteration's time, from rates by the papers' own counts of FLOPs."""
        is_full = recompute == "full"
        if mfu := self.full_mfu if is_full else self.selective_mfu:
            return self.model_flops() / (mfu * self.devices * peak_flops_per_s)
        if is_full and self.full_flops_per_s:
            return self.hardware_flops() / (self.full_flops_per_s * self.devices)
        return self.full_s if is_full else self.selective_s


class Held(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The published memory of a run."""

    states_gib: float
    activations_gib: dict[Recompute, float]
    left_percent: dict[str, float]


def published() -> list[Published]:
    """All runs of the data file."""
    return msgspec.convert(_data()["runs"], list[Published])


def held() -> dict[str, Held]:
    """Return the published memory by run of Korthikanti's table 5."""
    return msgspec.convert(_data()["memory"], dict[str, Held])


def machine() -> Machine:
    """Selene by its profile, with the cited figures of links."""
    links = _data()["links"]
    found = nominal_machine(load_cluster("selene")[0], None, _DEVICES_OF_NODE)
    inside = found.comm.intra_node
    wire = HockneyLink(inside.latency_s, 1 / links["all_reduce_bytes_per_s"])
    span = GroupLinks(_DEVICES_OF_NODE, 1, wire, wire, found.comm.trees)
    all_reduces = [
        MeasuredMessage(
            shape=MessageShape("all_reduce", _DEVICES_OF_NODE, _DEVICES_OF_NODE, 1, size),
            tasks_per_node=_DEVICES_OF_NODE,
            seconds=collective_s("all_reduce", span, size),
        )
        for size in (2**10, 2**30)
    ]
    comm = msgspec.structs.replace(
        found.comm,
        messages=all_reduces,
        inter_node=HockneyLink(found.comm.inter_node.latency_s, 1 / links["adapter_bytes_per_s"]),
    )
    return msgspec.structs.replace(found, comm=comm)


def measured_all_reduces() -> list[tuple[float, float]]:
    """Bytes and seconds of all_reduces on a DGX A100; nothing is made of them but a check."""
    return [(size, 1e-3 * milliseconds) for size, milliseconds in _data()["links"]["all_reduce_ms"]]


def product_efficiency(peak_flops_per_s: float, processors: int) -> float:
    """Return the median share of the peak that measured matrix products reach, without the loss of their last waves."""
    found: list[float] = []
    for rows, columns, inner, milliseconds in _data()["products"]["measured"]:
        kernel = Kernel(
            kind="Linear",
            direction=FORWARD,
            precision="bf16",
            flops=2.0 * rows * columns * inner,
            moved_bytes=0.0,
            weight_bytes=0.0,
            input_bytes=2.0 * rows * inner,
            output_bytes=2.0 * rows * columns,
        )
        rate = kernel.flops / (1e-3 * milliseconds)
        found.append(rate / (peak_flops_per_s * wave_efficiency(kernel, processors)))
    return statistics.median(found)


def spec_of(run: Published, recompute: Recompute) -> RunSpec:
    """Return the run; options beyond the strategy's own are those of ``oracle.tensor_rank.TensorParallelRank``."""
    chunks = run.pp * run.interleaving
    per_chunk = run.layers // chunks
    options: dict[str, Any] = {
        "cuts": ",".join(str(1 + per_chunk * chunk) for chunk in range(1, chunks)),
        "recompute": "always" if recompute == "full" else "never",
        "vocabulary_parallel": run.tp > 1,
        "sequence_parallel": recompute == "selective",
    }
    if run.interleaving > 1:
        options["virtual_stages"] = run.interleaving
    return RunSpec(
        model="gpt",
        dataset="tokens",
        input_size=TOKENS,
        strategy="interleaved_1f1b" if run.interleaving > 1 else "1f1b",
        options=options,
        nodes=run.devices // _DEVICES_OF_NODE,
        tasks_per_node=_DEVICES_OF_NODE,
        batch_size=run.batch // run.dp,
        micro_batches=run.batch // (run.dp * run.micro_batch),
        dp_degree=run.dp,
        tp_degree=run.tp,
        pp_degree=run.pp,
        precision="bf16",
        optimizer="adam",
    )


def plan_of(run: Published, recompute: Recompute, rank: int = 0) -> MegatronRun:
    """One rank of the run."""
    gpt = Gpt(run.layers, run.width, run.heads, selective=recompute == "selective", tied=run.pp == 1)
    return MegatronRun(spec_of(run, recompute), table_of(gpt), rank, gpt)


def _data() -> dict[str, Any]:
    return tomli.loads(_DATA.read_text(encoding="utf-8"))
