"""Channel parallelism: registry entries."""

from __future__ import annotations

from hpcbench.config.option import Option
from hpcbench.strategies.channel.channel_split import channel_exclusion, channel_table_exclusion
from hpcbench.strategies.strategy_entry import HybridAlias, StrategyEntry, refuse_bf16_params

_CHANNEL_OPTIONS = {
    "form": Option(
        "sharded", "between layers: activations split by channels, or whole on every rank", ("sharded", "gathered")
    ),
    "split_last": Option(False, "the last layer is split, too"),
}


def _channel_entry(description: str) -> StrategyEntry:
    return StrategyEntry(
        own_degree="tp_degree",
        description=description,
        options=_CHANNEL_OPTIONS,
        exclusion=refuse_bf16_params("its split layers take fp32 weights", channel_exclusion),
        table_exclusion=channel_table_exclusion,
        hybrid=("dp_degree",),
    )


STRATEGIES = {
    "filter": _channel_entry(
        "every layer's output channels shared by the ranks: each computes some filters",
    ),
    "channel": _channel_entry(
        "every layer's input channels shared by the ranks: each adds its part to every output",
    ),
}

ALIASES = {"data_filter": HybridAlias("filter"), "data_channel": HybridAlias("channel")}
