"""``python -m hpcbench.worker``: one rank of a run; ``fork``, which starts all ranks of one machine; the verbs
``begin`` and ``end`` around the ranks; ``doctor``; ``data``."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import socket
import sys
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcbench.errors import HpcbenchError
from hpcbench.worker.failure import install_hint

if TYPE_CHECKING:
    from hpcbench.worker.distributed.rank_environment import RankInfo

REQUIRED_MODULES = ("torch", "msgspec", "psutil")
OPTIONAL_MODULES = ("numpy", "PIL", "h5py", "torchvision", "sklearn", "horovod.torch", "fairscale")


def print_environment_check() -> int:
    """Print one JSON document on stdout; 0 where all that a worker needs to start is available, else 1."""
    report = check_environment()
    print(json.dumps(report, indent=1))  # noqa: T201 - the document that was asked for
    return 0 if report["ready"] else 1


def check_environment() -> dict[str, Any]:
    """``ready``, the interpreter, and per module ``{"works", "version", "error", "hint"}``; for torch its devices."""
    modules = {name: _check_module(name) for name in REQUIRED_MODULES + OPTIONAL_MODULES}
    report: dict[str, Any] = {
        "ready": all(modules[name]["works"] for name in REQUIRED_MODULES),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "cores": os.cpu_count(),
        "modules": modules,
    }
    if modules["torch"]["works"]:
        from hpcbench.worker.measure.environment_record import torch_facts

        report["torch"] = torch_facts()
    return report


def _check_module(name: str) -> dict[str, Any]:
    try:
        module = _load_module(name)
    except BaseException as error:  # noqa: BLE001 - a broken package can raise anything, and that is the finding
        # The text of hpcbench's own errors ends with their hint.
        text = error.message if isinstance(error, HpcbenchError) else f"{type(error).__name__}: {error}"
        return {"works": False, "error": text, "hint": install_hint(name)}
    top = sys.modules.get(name.partition(".")[0], module)
    return {"works": True, "version": str(getattr(top, "__version__", "")) or None}


def _load_module(name: str) -> Any:
    """Import ``name``, and for some packages more, so that they are known to work."""
    if name == "torchvision":
        from hpcbench.worker.models.torchvision_models import import_torchvision_models

        return import_torchvision_models()
    if name == "horovod.torch":
        from hpcbench.strategies.horovod.train import load_horovod

        return load_horovod()
    with warnings.catch_warnings():
        if name == "fairscale":
            # Its decorators for autocast have moved since; they still work.
            warnings.simplefilter("ignore", FutureWarning)
            importlib.import_module("fairscale.nn.data_parallel")
            importlib.import_module("fairscale.optim.oss")
        return importlib.import_module(name)


_EPILOG = """\
exit codes
  a rank  0 the run is ok, as far as this rank can see; 1 it is not, and the result has the reason
  fork    0 all ranks ended with 0; otherwise that of the first that did not
  begin   0 the attempt's folder is on stdout; 10 the run needs no attempt: done, cancelled, ended here, or skipped
  end     0 the tree contains how the run ended; 11 the job is being preempted, the run is to be run again;
          otherwise that of --exit-code, or 3
  doctor  0 a worker can start here; 1 it cannot
  all     2 the task file or an argument is wrong; 3 the file system refused
"""


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for; returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        return _run_verb(words)
    except HpcbenchError as error:
        print(f"hpcbench: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code


def _run_verb(words: list[str]) -> int:
    verb = words[0] if words and not words[0].startswith("-") else "rank"
    if verb == "doctor":
        _argument_parser("doctor").parse_args(words[1:])
        return print_environment_check()
    if verb == "data":
        from hpcbench.worker.data.make_samples import main as make

        return make(words[1:])
    args = _argument_parser(verb).parse_args(words if verb == "rank" else words[1:])
    if verb == "begin":
        from hpcbench.worker.begin import begin

        return begin(args.tasks, args.index, args.time_limit_s, args.missing_module)
    if verb == "end":
        from hpcbench.worker.end import end

        return end(args.tasks, args.index, args.attempt, args.exit_code, args.received, args.job_says)
    if verb == "fork":
        from hpcbench.worker.fork_ranks import fork_ranks

        return fork_ranks(args.tasks, args.index, args.ranks, partial(_run_rank_process, args))
    return _run_rank_process(args)


def _run_rank_process(args: argparse.Namespace, info: RankInfo | None = None) -> int:
    from hpcbench.worker.run_rank import run_rank
    from hpcbench.worker.shutdown import exit_now

    code = 1
    try:
        code = run_rank(args.tasks, args.index, args.attempt, info)
    except HpcbenchError as error:
        print(f"hpcbench: {error}", file=sys.stderr)  # noqa: T201
        code = error.exit_code
    except BaseException:  # noqa: BLE001 - shown, and the process ends below
        traceback.print_exc()
    # Threads may still sit in the store, and a dead peer's sockets in a collective: nothing is left to wait for.
    exit_now(code)
    return code


def _argument_parser(verb: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpcbench.worker" + ("" if verb == "rank" else f" {verb}"),
        usage="%(prog)s [fork|begin|end|doctor|data] [options]" if verb == "rank" else None,
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if verb == "doctor":
        parser.add_argument("--json", action="store_true", help="one JSON document (there is no other form)")
        return parser
    if verb not in ("rank", "fork", "begin", "end"):
        parser.error(f"unknown verb {verb!r}: fork, begin, end, doctor and data are there; without one this is a rank")
    parser.add_argument("--tasks", type=Path, required=True, metavar="FILE", help="the task file")
    parser.add_argument("--index", type=int, required=True, metavar="N", help="which run of it, from 0")
    if verb == "begin":
        parser.add_argument("--time-limit-s", type=float, metavar="S", help="instead of the task's")
        text = "the module that the job script could not load, with the reason: the run ends as unsupported"
        parser.add_argument("--missing-module", default="", metavar="TEXT", help=text)
    else:
        parser.add_argument("--attempt", type=int, required=verb == "end", metavar="K", help="the attempt's number")
    if verb == "fork":
        parser.add_argument("--ranks", type=int, required=True, metavar="N", help="how many ranks to start")
    if verb == "end":
        parser.add_argument("--exit-code", type=int, required=True, metavar="RC", help="of the launcher")
        parser.add_argument("--received", default="", metavar="SIGNAL", help="signal that the batch script received")
        text = "output of `scontrol show job --oneliner` about the job"
        parser.add_argument("--job-says", default="", metavar="TEXT", help=text)
    return parser


if __name__ == "__main__":
    sys.exit(main())
