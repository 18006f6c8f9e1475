"""The command ``validate``, apart from ``predict``: it reads results, which needs polars."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from hpcbench.cli.common import filter_options, out_option, print_json, print_message, read_options, sources_argument
from hpcbench.cli.oracle_commands import show_view
from hpcbench.fileio import encode_indented_json, write_atomic
from hpcbench.predict.calibration.calibration_store import check_disturbed
from hpcbench.report.column_names import Condition
from hpcbench.report.load_results import load_frame
from hpcbench.report.prediction_view import machine_notes
from hpcbench.report.table_files import write_view
from hpcbench.report.validation import (
    VALIDATION_COLUMNS,
    cases_view,
    choices_view,
    errors_view,
    validate,
    validation_json,
)
from hpcbench.results.results_tree import ResultsTree
from hpcbench.results.schema import STATUS_OK
from hpcbench.units import pluralize


@click.command("validate")
@sources_argument
@filter_options
@click.option("--cases", "every", is_flag=True, help="Also list every configuration.")
@click.option("--busy", "takes_disturbed", is_flag=True, help="Compare even if others disturbed every run.")
@out_option(".json: everything; .csv .md .tex .xlsx .parquet: every configuration.")
@read_options
def validate_predictions(
    sources: tuple[str, ...], cluster_name: str | None, where: str | None, every: bool,
    takes_disturbed: bool, out: Path | None, results: ResultsTree, as_json: bool,
) -> None:  # fmt: skip
    """Compare measured with predicted step times: error, rank, and the regret of choosing by the predictions.

    Each prediction leaves out the results of its own configuration. The regret of the predicted best is printed next to
    that of always choosing ddp. Runs that failed although they were predicted to run are counted.
    """
    condition = Condition(where, "--where") if where is not None else None
    columns = [*VALIDATION_COLUMNS, "warnings", *(condition.columns if condition else [])]
    frame = load_frame(results, sources, [cluster_name] if cluster_name else None, columns)
    if condition:
        frame = frame.filter(condition.mask(frame))
    warnings = [msgspec.json.decode(text or "[]") for text in frame.filter(frame["status"] == STATUS_OK)["warnings"]]
    noted = check_disturbed(warnings, "runs", "nothing was compared", takes_disturbed=takes_disturbed)
    validation = validate(frame, results)
    validation.notes.extend(noted)
    if out is not None:
        if out.suffix == ".json":
            write_atomic(out, encode_indented_json(validation_json(validation)))
        else:
            write_view(cases_view(validation.cases), out)
        print_message(f"{pluralize(len(validation.cases), 'configuration')} written to {out}")
    if as_json:
        print_json(validation_json(validation))
    elif not validation.cases:
        print_message("\n".join([f"no results to validate in {', '.join(sources) or results.root}", *validation.notes]))
    elif out is None or every:
        show_view(errors_view(validation.cases), [*machine_notes(validation.machines), *validation.notes, ""])
        if validation.choices:
            show_view(choices_view(validation.choices), [""])
        if every:
            show_view(cases_view(validation.cases), [""])
