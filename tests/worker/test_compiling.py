"""torch.compile through the real compiler, on a model of one layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hpcbench.strategies.data.train import SingleStrategy
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.failure import describe_error
from hpcbench.worker.model_execution import compile_in_place, count_compiled_graphs, recompilation_warning, wrap_blocks
from hpcbench.worker.shutdown import StopController
from hpcbench.worker.training_loop import LoopProgress, held_out_accuracy, run_training_loop
from tests.worker.helpers import make_spec

CPU = torch.device("cpu")


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()


def train(**values: Any) -> tuple[SingleStrategy, LoopProgress]:
    """Batches of 700 of 1500 samples: every third holds 100, and the first of those is timed."""
    spec = make_spec(batch_size=700, warmup_steps=2, steps=2, precision="fp64", **values)
    strategy, feed, progress = SingleStrategy(), make_feed(spec, CPU), LoopProgress(spec, CPU)
    strategy.setup(wrap_blocks(small(), spec), spec, RankContext(0, 1, CPU))
    run_training_loop(strategy, feed, spec, progress, StopController(), lambda: None)
    return strategy, progress


@pytest.mark.slow
def test_compiled_training_equals_eager_training_and_recompilation_is_warned_of() -> None:
    eager, plain = train()
    before = count_compiled_graphs()
    compiled, progress = train(compile=True)
    made = count_compiled_graphs() - before
    assert made == 2, "one for the whole model, another for the partial batch"
    assert progress.recompiled == 1
    assert progress.warnings() == [recompilation_warning(1)]
    assert plain.warnings() == []
    assert progress.read_losses(may_wait=True) == pytest.approx(plain.read_losses(may_wait=True), rel=1e-12)
    assert list(compiled.weights()) == list(eager.weights()) == ["1.weight", "1.bias"]
    for name, tensor in eager.weights().items():
        assert torch.allclose(compiled.weights()[name], tensor, rtol=0, atol=1e-12)
    spec = make_spec(precision="fp64")
    assert held_out_accuracy(compiled.module, make_feed(spec, CPU)) == held_out_accuracy(
        eager.module, make_feed(spec, CPU)
    )
    assert count_compiled_graphs() - before == made, "nothing is compiled for an evaluation"


def test_an_error_of_the_compiler_becomes_one_line() -> None:
    def refusing(_graph: Any, _inputs: Any) -> Any:
        raise RuntimeError("cannot lower this\nand much more")

    model = wrap_blocks(small(), make_spec(compile=True))
    compile_in_place(model, backend=refusing)
    with pytest.raises(Exception, match="cannot lower this") as caught:
        model(torch.ones(2, 1, 8, 8, dtype=torch.float64))
    status, failure = describe_error(caught.value)
    assert (status, failure.message.count("\n")) == ("failed", 0)
    assert "cannot lower this" in failure.message
    assert failure.hint is not None
    assert "compile = false" in failure.hint


class NoCompiler(RuntimeError):
    """An error of the compiler, recognised by the module that defines it."""

    __module__ = "torch._inductor.exc"


@pytest.mark.parametrize(
    "message",
    [
        "InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')\n\nSet ...",
        "Cannot find a working triton installation. Either the package is not installed or it is too old.",
    ],
)
def test_a_node_without_a_compiler_does_not_support_it(message: str) -> None:
    status, failure = describe_error(NoCompiler(message))
    assert (status, failure.message) == ("unsupported", message.partition("\n")[0])
    assert failure.hint is not None
    assert "C++ compiler" in failure.hint


@pytest.mark.parametrize(("count", "start"), [(1, "1 graph compiled"), (3, "3 graphs compiled")])
def test_recompilation_gives_a_warning_with_the_count(count: int, start: str) -> None:
    warning = recompilation_warning(count)
    assert warning is not None
    assert warning.startswith(start)
    assert "drop_last" in warning
    assert recompilation_warning(0) is None
