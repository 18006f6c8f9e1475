from __future__ import annotations

from collections.abc import Callable

import pytest

from hpcbench.config.sweep_file import StopRule
from hpcbench.config.sweep_loader import Sweep
from hpcbench.errors import HpcbenchError

Write = Callable[[str], Sweep]

BASE = """name = "s"
[fixed]
model_options = { depth = 3 }
[grid]
batch_size = [8, 16]
channels_last = [true, false]
seed = [1, 2]
options = { bucket_cap_mb = [1, 2.5] }
[[zip]]
steps = [1, 2]
[scaling]
kind = "weak"
nodes = [1, 2]
[[include]]
micro_batches = 2
"""


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("", []),
        ("oom = 'batch_size'", [StopRule(["oom"], (("batch_size",),))]),
        ("oom = ['steps']\nfailed = 'steps'", [StopRule(["oom", "failed"], (("steps",),))]),
        (
            "timeout = ['nodes', 'options.bucket_cap_mb', 'nodes']\nunsupported = 'micro_batches'",
            [
                StopRule(["timeout"], (("nodes",), ("options", "bucket_cap_mb"))),
                StopRule(["unsupported"], (("micro_batches",),)),
            ],
        ),
    ],
)
def test_a_stop_table_is_read_as_stop_rules(write_sweep: Write, text: str, rules: list[StopRule]) -> None:
    assert write_sweep(f"{BASE}[stop]\n{text}\n").stops == rules


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "oom = 'batch_sise'",
            r"sweep.toml:17: stop.oom: 'batch_sise' is not varied by this sweep\n  did you mean 'batch_size'\?",
        ),
        (
            "oom = 'batch_size'\ntimeout = ['steps', 'warmup_steps']",
            r"sweep.toml:18: stop.timeout: 'warmup_steps' is not varied",
        ),
        ("oom = 'model_options.depth'", "is not varied"),
        ("oom = 'channels_last'", "'channels_last' has no size"),
        ("oom = 'seed'", "'seed' has no size"),
        ("ok = 'steps'", r"sweep.toml:17: unknown key 'ok' in \[stop\]\n.*oom"),
        ("oom = []", r"sweep.toml:17: stop.oom"),
        ("oom = 3", r"sweep.toml:17: stop.oom"),
    ],
)
def test_invalid_stop_tables_are_refused_with_file_and_line(write_sweep: Write, text: str, message: str) -> None:
    with pytest.raises(HpcbenchError, match=message):
        write_sweep(f"{BASE}[stop]\n{text}\n")
