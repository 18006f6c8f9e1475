"""``python -m hpcbench.worker``: one rank of a run; the verbs ``begin`` and ``end`` around the ranks; ``doctor``;
``data``.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path

from hpcbench.errors import HpcbenchError

_EPILOG = """\
exit codes
  a rank  0 the run is ok, as far as this rank can see; 1 it is not, and the result has the reason
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
        from hpcbench.worker.environment_check import print_environment_check

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
    return _run_rank_process(args)


def _run_rank_process(args: argparse.Namespace) -> int:
    from hpcbench.worker.run_rank import run_rank
    from hpcbench.worker.shutdown import exit_now

    code = 1
    try:
        code = run_rank(args.tasks, args.index, args.attempt)
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
        usage="%(prog)s [begin|end|doctor|data] [options]" if verb == "rank" else None,
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if verb == "doctor":
        parser.add_argument("--json", action="store_true", help="one JSON document (there is no other form)")
        return parser
    if verb not in ("rank", "begin", "end"):
        parser.error(f"unknown verb {verb!r}: begin, end, doctor and data are there; without one this is a rank")
    parser.add_argument("--tasks", type=Path, required=True, metavar="FILE", help="the task file")
    parser.add_argument("--index", type=int, required=True, metavar="N", help="which run of it, from 0")
    if verb == "begin":
        parser.add_argument("--time-limit-s", type=float, metavar="S", help="instead of the task's")
        text = "the module that the job script could not load, with the reason: the run ends as unsupported"
        parser.add_argument("--missing-module", default="", metavar="TEXT", help=text)
    else:
        parser.add_argument("--attempt", type=int, required=verb == "end", metavar="K", help="the attempt's number")
    if verb == "end":
        parser.add_argument("--exit-code", type=int, required=True, metavar="RC", help="of the launcher")
        parser.add_argument("--received", default="", metavar="SIGNAL", help="signal that the batch script received")
        text = "output of `scontrol show job --oneliner` about the job"
        parser.add_argument("--job-says", default="", metavar="TEXT", help=text)
    return parser


if __name__ == "__main__":
    sys.exit(main())
