"""Tables of a profiler's events with the split that they must give; times are written in seconds."""

from __future__ import annotations

from typing import Any

import pytest

from hpcbench.results.schema import StepPhases
from hpcbench.worker.measure.step_profiler import ProfilerEvent, split_phases


def event(name: str, begin: float, end: float, **more: Any) -> ProfilerEvent:
    return ProfilerEvent(name, int(begin * 1e9), int(end * 1e9), **more)


def gloo(name: str, begin: float, end: float) -> ProfilerEvent:
    return event(name, begin, end, is_async=True)


def kernel(name: str, begin: float, end: float, launched: float | None = None) -> ProfilerEvent:
    return event(name, begin, end, on_device=True, launched=None if launched is None else int(launched * 1e9))


MARKS = [
    event("hpcbench.step", 0, 10),
    event("hpcbench.data", 0, 1),
    event("hpcbench.forward", 1, 3),
    event("hpcbench.backward", 3, 8),
    event("hpcbench.optimizer", 8, 10),
]
PARTS = {"step_s": 10.0, "data_s": 1.0, "forward_s": 2.0, "backward_s": 5.0, "optimizer_s": 2.0}
HOST = [
    event("aten::conv2d", 1, 3),
    event("aten::convolution", 1, 2),
    event("autograd::engine::evaluate_function: ConvolutionBackward0", 3, 6),
    event("ConvolutionBackward0", 3, 6),
    event("aten::convolution_backward", 3, 5),
    event("Optimizer.step#SGD.step", 8, 10),
    event("aten::add_", 8, 9.5),
]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        # Without communication its parts are absent, and what wraps operators is no computing.
        (HOST, {"compute_s": 5.5}),
        # A collective half under the backward pass.
        ([*HOST, gloo("gloo:all_reduce", 4, 7)], {"compute_s": 5.5, "comm_s": 3.0, "exposed_comm_s": 2.0}),
        # Two at once are under way once; one that began before the step counts from its beginning.
        (
            [*HOST, gloo("gloo:all_reduce", 5, 7), gloo("gloo:send", 6, 8), gloo("gloo:broadcast", -2, 1)],
            {"compute_s": 5.5, "comm_s": 4.0, "exposed_comm_s": 4.0},
        ),
        # An operator that waits for a collective does not compute meanwhile.
        (
            [event("aten::sum", 4, 9), event("_c10d_functional::wait_tensor", 5, 8), gloo("gloo:all_reduce", 4, 8)],
            {"compute_s": 2.0, "comm_s": 4.0, "exposed_comm_s": 3.0},
        ),
        # Starting a collective is not computing.
        ([event("c10d::allreduce_", 4, 5)], {}),
        ([event("## Call CompiledFxGraph fxyz ##", 3, 5), event("mylib::fused", 6, 7)], {"compute_s": 3.0}),
    ],
)
def test_host_events_are_split_into_computation_and_communication(
    events: list[ProfilerEvent], expected: dict[str, float]
) -> None:
    assert split_phases([*MARKS, *events], cuda=False) == StepPhases(**PARTS, **expected)


def test_on_a_device_the_kernels_count() -> None:
    found = split_phases(
        [
            *MARKS,
            event("aten::conv2d", 1, 3),
            kernel("Memcpy HtoD (Pinned -> Device)", 0, 1, launched=0.5),
            kernel("sgemm", 2, 4, launched=1.5),
            kernel("dgrad", 4, 7, launched=3.5),
            kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 6, 9, launched=4),
            kernel("adam", 9, 9.5, launched=8.5),
            kernel("Memset (Device)", 9.5, 9.75),
        ],
        cuda=True,
    )
    # The copy from the host waits for no arithmetic, and the memset that nobody is known to have asked for has no phase.
    assert found == StepPhases(
        step_s=10.0, data_s=1.0, forward_s=2.0, backward_s=3.0, optimizer_s=0.5,
        compute_s=5.75, comm_s=3.0, exposed_comm_s=2.0,
    )  # fmt: skip


def test_several_steps_give_the_median_of_each_part() -> None:
    steps = [event("hpcbench.step", begin, begin + length) for begin, length in ((0, 4), (10, 2), (20, 9))]
    work = [event("aten::mm", 0, 1), event("aten::mm", 10, 12), event("aten::mm", 20, 25)]
    between = [gloo("gloo:barrier", 5, 9), gloo("gloo:all_reduce", 20, 21)]
    assert split_phases([*steps, *work, *between], cuda=False) == StepPhases(
        step_s=4.0, compute_s=2.0, comm_s=1.0, exposed_comm_s=0.0
    )


def test_gradient_accumulation_marks_a_phase_more_than_once() -> None:
    marks = [
        event("hpcbench.step", 0, 10),
        *(event("hpcbench.forward", begin, begin + 1) for begin in (0, 4)),
        *(event("hpcbench.backward", begin, begin + 2) for begin in (1, 5)),
    ]
    assert split_phases(marks, cuda=False) == StepPhases(step_s=10.0, forward_s=2.0, backward_s=4.0)
