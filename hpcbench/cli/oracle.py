"""``predict``, ``recommend``, ``validate``: what the oracle says before, and how right it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hpcbench.cli.common import cluster_option, console, json_option, load_plan, print_json, results_option, tree

if TYPE_CHECKING:
    from hpcbench.report.view import View
    from hpcbench.submit.forecast import Forecast
    from hpcbench.submit.plan import Plan


@click.command()
@click.argument("sweep")
@cluster_option()
@click.option("--where", metavar="EXPR", help="Only runs for which it holds: 'strategy == \"ddp\" and fits'.")
@results_option
@json_option
def predict(sweep: str, cluster_name: str, where: str | None, results: str | None, as_json: bool) -> None:
    """Say how long a step of every run of SWEEP would take on a cluster, what binds it, and whether it fits.

    Nothing is submitted and no scheduler is asked. The numbers are those of the cluster's newest calibration, or its
    profile's; which, and what had to be guessed, is said above the table.
    """
    from hpcbench.report.predictions import machine_notes, predictions, predictions_json, predictions_view

    made = load_plan(sweep, cluster_name, results)
    forecast = _forecast(made, results)
    found = predictions(made.runs, forecast, where)
    if as_json:
        print_json(predictions_json(found, forecast.machines()))
        return
    title = f"{made.sweep.name} on {made.profile.name}: {len(found)} configurations, predicted"
    _show(predictions_view(found, title), machine_notes(forecast.machines()))


def _forecast(made: Plan, results: str | None) -> Forecast:
    from hpcbench.parallel.check import model_folder
    from hpcbench.submit.forecast import Forecast

    return Forecast(made.profile, tree(results).cluster(made.profile.name), model_folder(made.sweep, made.profile))


def _show(view: View, above: list[str]) -> None:
    from rich.text import Text

    from hpcbench.fileio import brief
    from hpcbench.report.show import view_renderable

    screen = console()
    for line in above:
        screen.print(Text(brief(line), style="dim"))
    screen.print(view_renderable(view, screen.width))
