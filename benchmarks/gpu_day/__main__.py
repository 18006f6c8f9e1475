"""``make gpu-kit``, ``make gpu-day``: the first day on a GPU (docs/gpu-check.md).

python -m benchmarks.gpu_day run --out FOLDER    all parts, at most 420 s
python -m benchmarks.gpu_day kit                 wheels for a node without a network
python -m benchmarks.gpu_day predict             predictions, to be committed before the day
python -m benchmarks.gpu_day report FOLDER       report.md once more
python -m benchmarks.gpu_day status              the table of cuda-paths.md
python -m benchmarks.gpu_day calibrate FOLDER    a calibration from a day's results
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> int:
    """Do what the first word says."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_day", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="run the day")
    run.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="gets at most seven files")
    run.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="device of the ranks")
    run.add_argument("--size", choices=("full", "small"), help="small models rehearse the day; the default on a cpu")
    run.add_argument("--unverified", action="store_true", help="where kernels compute nothing: under a stub of CUDA")
    run.add_argument("--seconds", type=float, default=420.0, help="time of the whole day")
    run.add_argument("--wheels", type=Path, metavar="FOLDER", help="the kit, to be compared with this Python")
    kit = verbs.add_parser("kit", help="pack missing packages")
    kit.add_argument("--out", type=Path, default=Path(".whl"), metavar="FOLDER")
    kit.add_argument("--python", default="3.12", metavar="X.Y", help="the node's Python")
    verbs.add_parser("predict", help="write the predictions")
    verbs.add_parser("status", help="write the table of cuda-paths.md")
    for name, text in (("report", "write report.md"), ("calibrate", "fit a calibration to a day's results")):
        verbs.add_parser(name, help=text).add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.verb == "run":
        from benchmarks.gpu_day.day import run_day
        from benchmarks.gpu_day.parts import Size

        size: Size = arguments.size or ("small" if arguments.device == "cpu" else "full")
        return run_day(
            arguments.out,
            arguments.device,
            size,
            arguments.seconds,
            arguments.wheels,
            verifies=not arguments.unverified,
        )
    if arguments.verb == "kit":
        from benchmarks.gpu_day.kit import make_kit

        return make_kit(arguments.out, arguments.python)
    if arguments.verb == "predict":
        from benchmarks.gpu_day.predictions import write_predictions

        write_predictions()
    elif arguments.verb == "report":
        from benchmarks.gpu_day.report import write_report

        write_report(arguments.folder)
    elif arguments.verb == "calibrate":
        from benchmarks.gpu_day.calibrate import calibrate_from_day

        return calibrate_from_day(arguments.folder)
    else:
        from benchmarks.gpu_day.status import write_page

        write_page()
    return 0


if __name__ == "__main__":
    sys.exit(main())
