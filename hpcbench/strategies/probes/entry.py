"""Runs that measure the machine instead of a strategy: blocks of a model, or collectives without any model.
The measurements are in the result's ``probe``."""

from __future__ import annotations

from hpcbench.config.option import Option
from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import ConfigError
from hpcbench.strategies.strategy_entry import StrategyEntry
from hpcbench.strategies.traffic import OVERLAPPED_OPERATIONS, message_shapes, parse_messages

PROBE_BLOCKS, COLLECTIVES = "probe_blocks", "collectives"
_BUDGET_OPTION = Option(20.0, "seconds that the measurements may take, about")


def probe_blocks_exclusion(spec: RunSpec) -> str | None:
    """Blocks are called one by one; collectives beside them are begun by all ranks, and waited for later."""
    if spec.compile or spec.activation_checkpointing:
        return "probe_blocks calls blocks one by one: compile and activation_checkpointing would change nothing"
    if spec.micro_batches > 1:
        return f"probe_blocks takes a batch as it is: micro_batches {spec.micro_batches}, 1 is right"
    try:
        shapes = parse_messages(str(spec.options.get("overlaps", "")))
    except ConfigError as error:
        return f"probe_blocks, overlaps: {error.message}"
    for shape in shapes:
        if (shape.nodes, shape.ranks_per_node) != (spec.nodes, spec.tasks_per_node):
            return f"probe_blocks overlaps collectives of all {spec.ranks} ranks, not of {shape.ranks}"
        if shape.operation not in OVERLAPPED_OPERATIONS:
            return f"probe_blocks overlaps {', '.join(OVERLAPPED_OPERATIONS)}, not {shape.operation}"
    return _probe_exclusion(spec)


def collectives_exclusion(spec: RunSpec) -> str | None:
    """Every group has as many ranks on every node of the run."""
    if not spec.options.get("messages") and not (spec.operation and spec.message_bytes):
        return 'collectives without operation or message_bytes: operation = "all_reduce", message_bytes = 1048576'
    if spec.tasks_per_node % (spec.group_tasks or 1):
        return f"groups of {spec.group_tasks} ranks on a node do not divide its {spec.tasks_per_node}"
    try:
        shapes = message_shapes(spec)
    except ConfigError as error:
        return f"collectives: {error.message}"
    for shape in shapes:
        if (shape.nodes != spec.nodes and spec.operation != "pairs") or shape.ranks_per_node > spec.tasks_per_node:
            return (
                f"collectives on {spec.nodes} nodes with {spec.tasks_per_node} ranks each: a group of {shape.ranks} "
                f"ranks, {shape.ranks_per_node} on every node, takes {shape.nodes} nodes"
            )
        if shape.ranks < 2 or (shape.operation == "send" and shape.ranks > 2):
            right = "2 ranks are" if shape.ranks > 2 else "two or more are"
            return f"{shape.operation} in a group of {shape.ranks}: {right} right"
    return _probe_exclusion(spec)


def _probe_exclusion(spec: RunSpec) -> str | None:
    if spec.verify:
        return f"{spec.strategy} is not a training that could be verified"
    budget_s = spec.options.get("budget_s", _BUDGET_OPTION.default)
    return None if isinstance(budget_s, int | float) and budget_s > 0 else f"{spec.strategy} with budget_s {budget_s}"


STRATEGIES = {
    PROBE_BLOCKS: StrategyEntry(
        own_degree="dp_degree",
        description="calibration: every block of the model, forward and backward, on ranks side by side",
        options={
            "overlaps": Option("", "instead: a pass beside collectives of all ranks, each as in messages"),
            "budget_s": _BUDGET_OPTION,
        },
        exclusion=probe_blocks_exclusion,
    ),
}
COLLECTIVES_ENTRY = StrategyEntry(
    own_degree="dp_degree",
    description="collectives and messages between ranks instead of a training",
    options={
        "messages": Option("", "instead of operation: operation:ranks:ranks_per_node:rivals:bytes, between commas"),
        "budget_s": _BUDGET_OPTION,
    },
    exclusion=collectives_exclusion,
)
"""The strategy of runs with ``workload = "collectives"``."""
