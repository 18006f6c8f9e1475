from __future__ import annotations

import pytest
import torch

from hpcbench.errors import WorkerError
from hpcbench.worker import failure as failure_module
from hpcbench.worker.failure import (
    FailureCause,
    decide_outcome,
    describe_error,
    install_hint,
    is_peer_lost,
    is_peer_lost_message,
)
from hpcbench.worker.model_execution import MixedPrecision
from hpcbench.worker.shutdown import PeerEnded
from tests.worker.helpers import failure, make_rank

CPU = torch.device("cpu")

ERRORS = [
    (ValueError("x"), "failed"),
    (MemoryError(), "oom"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "oom"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"), "oom"),
    (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."), "oom"),
    (OSError(12, "Cannot allocate memory"), "oom"),
    (ValueError("not enough memory of mine"), "failed"),
    (ModuleNotFoundError("No module named 'sklearn'", name="sklearn"), "unsupported"),
    (WorkerError("no", status="unsupported", hint="do"), "unsupported"),
    (WorkerError("no"), "failed"),
]


@pytest.mark.parametrize(("error", "status"), ERRORS)
def test_an_exception_determines_status_and_error_record(error: BaseException, status: str) -> None:
    found, record = describe_error(error)
    assert found == status
    assert record.type == type(error).__name__
    assert record.traceback_tail


def test_errors_of_users_carry_a_hint() -> None:
    assert (
        describe_error(ERRORS[7][0])[1].hint == "python -m pip install scikit-learn" == install_hint("sklearn.datasets")
    )
    assert "batch_size" in (describe_error(MemoryError())[1].hint or "")
    assert describe_error(WorkerError("message", hint="mend"))[1].message == "message"


DUPLICATE_GPU = (
    "NCCL error in: NCCLUtils.cpp:77, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.27.3\n"
    "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"
)


def test_two_ranks_on_mig_instances_of_one_gpu_get_a_hint() -> None:
    status, record = describe_error(torch.distributed.DistBackendError(DUPLICATE_GPU))
    assert status == "failed"
    assert "MIG instances of one GPU" in str(record.hint)


def test_a_message_cannot_steer_a_terminal() -> None:
    record = describe_error(ValueError("\x1b[31mred"))[1]
    assert "\x1b" not in record.message + (record.traceback_tail or "")


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[pair.cc:537] Read error [127.0.0.1]:19: Connection reset by peer."), True),
        (RuntimeError("[pair.cc] Connection closed by peer [10.0.0.1]:5"), True),
        (RuntimeError("[unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"), True),
        (torch.distributed.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (torch.distributed.DistBackendError(DUPLICATE_GPU), False),
        (PeerEnded("x"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("connection reset by peer"), False),
        (WorkerError("waited 3 s: timed out"), False),
        (RuntimeError("CUDA out of memory"), False),
    ],
)
def test_errors_caused_by_another_ranks_end_are_recognised(error: BaseException, lost: bool) -> None:
    assert is_peer_lost(error) is lost
    if not isinstance(error, WorkerError):
        assert is_peer_lost_message(type(error).__name__, str(error)) is lost


# The verdict


def cause(status: str = "failed", rank: int = 1, kind: str = "ValueError") -> FailureCause:
    return FailureCause(rank, "n1", status, failure(kind, "mine"))


@pytest.fixture(autouse=True)
def no_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_module, "oom_kills", lambda: 4)


@pytest.mark.parametrize(("before", "status"), [(4, "failed"), (3, "oom"), (None, "failed")])
def test_a_rank_without_a_file_is_failed_or_oom(before: int | None, status: str) -> None:
    ranks = {0: make_rank(0, status="failed", error=failure("RuntimeError", "Connection closed by peer"))}
    found = decide_outcome(2, ranks, cause=None, only_follows=True, launcher="srun", oom_kills_before=before)
    assert found.status == status
    assert found.error is not None
    assert "rank 1 ended without leaving a file" in found.error.message
    assert "rank 0 saw: Connection closed by peer" in found.error.message


@pytest.mark.parametrize(("launcher", "status"), [("srun", "cancelled"), ("torchrun", "failed")])
def test_a_sigterm_counts_as_cancelled_only_under_srun(launcher: str, status: str) -> None:
    """torchrun tells the others TERM when it has lost a rank; srun passes on what the job was told."""
    ranks = {0: make_rank(0, status="cancelled", error=failure("Stopped", "stopped by SIGTERM"))}
    told = cause("cancelled", rank=0, kind="Stopped")
    found = decide_outcome(2, ranks, cause=told, only_follows=False, launcher=launcher, oom_kills_before=4)
    assert found.status == status


@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_cuda_precisions_on_a_cpu_are_unsupported(precision: str) -> None:
    with pytest.raises(WorkerError, match=f"precision {precision} needs a cuda device") as caught:
        MixedPrecision(precision, CPU)
    assert caught.value.status == "unsupported"


def test_fp32_disables_tf32_on_cuda() -> None:
    MixedPrecision("fp32", CPU)
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32
    with MixedPrecision("bf16", CPU).autocast():
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.bfloat16
