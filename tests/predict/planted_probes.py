"""Results of probes on a machine whose times are known: every layer takes ``slower`` times the profile's."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.run_spec import RunSpec, config_id, run_id
from hpcbench.predict.calibration.calibration_store import CalibrationRun
from hpcbench.predict.cost_model import row_kernels
from hpcbench.predict.kernel_prices import roofline_s
from hpcbench.predict.machine import nominal_machine
from hpcbench.results.probe_records import (
    BlockProbe,
    CollectiveProbe,
    OverlapProbe,
    ProbeResults,
)
from hpcbench.results.schema import RunMetrics, RunResult, StepTimeStatistics
from hpcbench.strategies.layer_table import LayerTable
from hpcbench.strategies.traffic import parse_messages
from tests.layer_tables import table_of_run

MESSAGE_S_PER_BYTE = 3e-9


def message_s(payload_bytes: float) -> float:
    return 2e-4 + MESSAGE_S_PER_BYTE * payload_bytes


def blocks_probe(
    profile: ClusterProfile, spec: RunSpec, slower: float, wall: float = 1.0, table: LayerTable | None = None
) -> ProbeResults:
    """What ``probe_blocks`` finds; ``wall``: passing time over the processors' own."""
    compute, table = nominal_machine(profile).compute, table or table_of_run(spec)
    own: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in table.layers:
        for direction, kernel in enumerate(row_kernels(spec, row, spec.batch_size)):
            own[row.block][direction] += slower * roofline_s(kernel, compute)
    blocks = [
        BlockProbe(block=block, samples=spec.batch_size, forward_s=forward_s, backward_s=backward_s, spread=0.01,
                   repeats=5)
        for block, (forward_s, backward_s) in sorted(own.items())
    ]  # fmt: skip
    total_s = sum(block.forward_s + (block.backward_s or 0.0) for block in blocks)
    return ProbeResults(base_memory_bytes=200 * 2**20, blocks=blocks, pass_s=wall * total_s)


def messages_probe(spec: RunSpec) -> ProbeResults:
    """The result of a run of collectives."""
    collectives = [
        CollectiveProbe(operation=shape.operation, ranks=shape.ranks, nodes=shape.nodes, groups=shape.rivals,
                        payload_bytes=shape.payload_bytes, seconds=message_s(shape.payload_bytes), spread=0.02, repeats=9)
        for shape in parse_messages(str(spec.options["messages"]))
    ]  # fmt: skip
    return ProbeResults(collectives=collectives)


SLOWDOWN, COMM_SLOWDOWN = 1.25, 2.0
"""Of a pass under collectives, and of collectives under a pass."""


def overlaps_probe(profile: ClusterProfile, spec: RunSpec, slower: float) -> ProbeResults:
    """What ``probe_blocks`` with ``overlaps`` finds."""
    pass_s = blocks_probe(profile, spec, slower).pass_s or 0.0
    comm_s = 2 * pass_s
    under_s = SLOWDOWN * pass_s
    overlaps = [
        OverlapProbe(operation=shape.operation, calls=2, ranks=shape.ranks, nodes=shape.nodes,
                     payload_bytes=shape.payload_bytes, compute_s=pass_s, comm_s=comm_s, compute_under_comm_s=under_s,
                     both_s=under_s + comm_s - under_s / COMM_SLOWDOWN, issue_s=1e-5, repeats=5)
        for shape in parse_messages(str(spec.options["overlaps"]))
    ]  # fmt: skip
    return ProbeResults(overlaps=overlaps)


def finished_run(spec: RunSpec, step_s: float = 1.0, peak_bytes: int | None = None, **more: Any) -> RunResult:
    """A run on the SLURM box whose steps all took as long, unless ``more`` says otherwise."""
    times = StepTimeStatistics(**{**dict.fromkeys(StepTimeStatistics.__struct_fields__, step_s), "std": 0.0})
    given: dict[str, Any] = {
        "run_id": run_id(spec), "config_id": config_id(spec), "attempt": 1, "sweep": "s", "cluster": "slurmbox",
        "status": "ok", "spec": spec, "environment_digest": "e",
        "metrics": RunMetrics(step_time_s=times, peak_memory_bytes=peak_bytes),
    }  # fmt: skip
    return RunResult(**{**given, **more})


def probe_run(
    profile: ClusterProfile, spec: RunSpec, slower: float = 3.0, table: LayerTable | None = None, **more: Any
) -> CalibrationRun:
    """A finished run of either probe; ``table`` is that of a model that is not shipped."""
    table = table or table_of_run(spec)
    if spec.workload == "collectives":
        probe = messages_probe(spec)
    elif spec.options.get("overlaps"):
        probe = overlaps_probe(profile, spec, slower)
    else:
        probe = blocks_probe(profile, spec, slower, table=table)
    return CalibrationRun(finished_run(spec, 0.1, cluster=profile.name, **({"probe": probe} | more)), table)
