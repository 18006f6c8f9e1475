"""The registry of plots, and their output as image, page or specification."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jinja2
import msgspec
import polars as pl

from hpcbench.errors import INSTALL_REPORT, ConfigError, did_you_mean
from hpcbench.fileio import escape_control_characters, write_atomic
from hpcbench.paths import results_folder
from hpcbench.report.column_names import (
    DERIVED_COLUMNS,
    Condition,
    resolve_column,
    source_columns,
    with_derived_columns,
    with_option_column,
    with_own_metrics,
)
from hpcbench.report.comparison import comparison_metric
from hpcbench.report.configurations import SPEC_COLUMNS, STEP_TIME, filter_launches, ok_results, varying_parameters
from hpcbench.report.load_results import full_results, load_frame
from hpcbench.report.plots import charts
from hpcbench.report.plots.breakdown_plots import distribution_plot, memory_plot, step_parts_plot, timeline_plot
from hpcbench.report.plots.collective_plots import pairs_plot
from hpcbench.report.plots.history_plot import DATE_COLUMN, VERSION_COLUMNS, history_plot
from hpcbench.report.plots.plot_model import DEVICES, NothingToDraw, Plot, PlotRequest
from hpcbench.report.plots.point_data import POINT_COLUMNS
from hpcbench.report.plots.scaling_plots import (
    BUS_BANDWIDTH,
    COLLECTIVE_COLUMNS,
    bandwidth_plot,
    efficiency_plot,
    energy_plot,
    measured_over_predicted_plot,
    scaling_plot,
    throughput_plot,
    utilisation_plot,
)
from hpcbench.report.table_model import short_name
from hpcbench.results.frame import JSON_TEXT, column_types
from hpcbench.results.results_tree import ResultsTree
from hpcbench.results.schema import RunResult
from hpcbench.strategies.catalog import COLLECTIVES


class PlotKind(NamedTuple):
    """One plot: the function that draws it, and the columns that it reads in addition to ``POINT_COLUMNS``."""

    title: str
    summary: str
    plot: Callable[[pl.DataFrame, PlotRequest], Plot]
    columns: tuple[str, ...] = ()
    whole: bool = False
    """Whether it needs ``PlotRequest.whole``: figures that are in result files alone."""
    on_page: bool = True
    """Whether a report has it."""
    workload: str | None = None
    """The workload that it is about; a report without runs of it does not mention the plot."""


OVER_DEVICES = "over devices"
"""End of the titles of plots whose axis ``--x`` replaces."""
_PHASE_COLUMNS = ("metrics.compute_s", "metrics.comm_s", "metrics.exposed_comm_s", "metrics.bubble_fraction")
_ENERGY_COLUMNS = ("metrics.energy_j", "metrics.energy_source", "metrics.step_time_s.mean", "spec.steps")
PLOTS: dict[str, PlotKind] = {
    "throughput": PlotKind("Throughput over devices", "samples or tokens per second over devices", throughput_plot,
                           ("metrics.tokens_per_s",)),
    "efficiency": PlotKind("Efficiency over devices", "speed-up per device over devices", efficiency_plot),
    "scaling": PlotKind("Step time over devices", "step time over devices, and where lines cross", scaling_plot),
    "parts": PlotKind("Where a step's time goes", "computation, communication and bubble of a step", step_parts_plot,
                      _PHASE_COLUMNS, whole=True),
    "memory": PlotKind("Peak memory per rank", "peak memory of every rank", memory_plot,
                       ("metrics.peak_memory_bytes",), whole=True),
    "distribution": PlotKind("Distribution of step times", "single steps of every configuration", distribution_plot,
                             whole=True),
    "timeline": PlotKind("Timeline of a pipeline's step", "a pipeline's step, rank by rank", timeline_plot,
                         ("metrics.bubble_fraction",), whole=True),
    "predicted": PlotKind("Measured over predicted step time", "measured over predicted step time",
                          measured_over_predicted_plot, ("spec.options",), whole=True),
    "mfu": PlotKind("Utilisation over devices", "MFU and HFU over devices", utilisation_plot,
                    ("metrics.mfu", "metrics.hfu")),
    "energy": PlotKind("Energy per sample over devices", "energy per sample over devices", energy_plot,
                       _ENERGY_COLUMNS),
    "bandwidth": PlotKind("Bus bandwidth over size", "bus bandwidth of collectives over their size", bandwidth_plot,
                          (*COLLECTIVE_COLUMNS, *source_columns((BUS_BANDWIDTH,))), workload=COLLECTIVES),
    "pairs": PlotKind("Messages between every two nodes", "bandwidth between every two nodes", pairs_plot,
                      COLLECTIVE_COLUMNS, whole=True, workload=COLLECTIVES),
    "history": PlotKind("Launches over time", "a metric over time, and where the environment changed", history_plot,
                        (DATE_COLUMN, *VERSION_COLUMNS, *SPEC_COLUMNS), on_page=False),
}  # fmt: skip


def plot_kind(name: str) -> PlotKind:
    """The entry of ``name``; where there is none, ``ConfigError`` with the nearest and with what each kind shows."""
    if name not in PLOTS:
        near = difflib.get_close_matches(name, PLOTS, n=1)
        first = f"did you mean {near[0]!r}?" if near else "a kind comes before sweeps, trees and bundles."
        kinds = "".join(f"\n    {kind:14}{entry.summary}" for kind, entry in PLOTS.items())
        raise ConfigError(f"no plot {name!r}", hint=f"{first} The kinds are:{kinds}")
    return PLOTS[name]


def draw_plot(name: str, frame: pl.DataFrame, request: PlotRequest | None = None) -> Plot:
    """The plot ``name`` of a frame of ``load_results.load_frame`` with ``plot_columns(name)`` at least."""
    kind, request = plot_kind(name), request or PlotRequest()
    if not request.by:
        # Commands have no strategy: lines are the parameters by which they differ.
        names = [f"spec.parameters.{parameter}" for parameter in varying_parameters(frame)]
        request = replace(request, by=tuple(one for one in names if one != request.x))
    try:
        plot = kind.plot(frame, request)
    except NothingToDraw as empty:
        return Plot(name, kind.title, nothing=str(empty), notes=empty.notes)
    chart = plot.drawing
    over = f"by {chart.legend}" if isinstance(chart, charts.BarChart) else f"over {short_name(request.x)}"
    title = kind.title.replace(OVER_DEVICES, over.replace("_", " "))
    return _with_scales(replace(plot, name=name, title=title))


def _with_scales(plot: Plot) -> Plot:
    """``plot`` with one scale for all of its panels, or with a scale for each; a note states which."""
    chart, frame = plot.drawing, plot.frame
    if frame is None or not isinstance(chart, charts.ScaledChart) or frame["panel"].n_unique() < 2:
        return plot
    own = charts.has_own_scales(frame, chart.value)
    note = "each panel has its own scale" if own else "all panels have the same scale"
    return replace(plot, drawing=replace(chart, own_scales=own), notes=[*plot.notes, note])


def _x_column(name: str, frame: pl.DataFrame) -> str:
    """The column of a parameter that differs between the results.

    Raises:
        ConfigError: there is no such parameter.
    """
    ended = with_derived_columns(ok_results(frame))
    tables = [column for column, kind in column_types().items() if kind == JSON_TEXT and column in SPEC_COLUMNS]
    for table in tables:
        keys = {key for text in ended[table].drop_nulls().unique() for key in msgspec.json.decode(text)}
        for key in sorted(keys):
            ended = with_option_column(ended, f"{table}.{key}")
    never = (*tables, "spec.repeat", "spec.seed")
    columns = [name for name in ended.columns if name.startswith("spec.") or name in DERIVED_COLUMNS]
    columns = [name for name in columns if name not in never and not ended.schema[name].is_nested()]
    swept = {short_name(column): column for column in columns if ended[column].n_unique() > 1}
    swept[DEVICES] = DEVICES
    if name.removeprefix("spec.") not in swept:
        raise ConfigError(f"--x {name}: no parameter that differs between the results", hint=did_you_mean(name, swept))
    return swept[name.removeprefix("spec.")]


class PlotOptions(NamedTuple):
    """Options of a plot, as text.

    Args:
        where: a condition on runs.
        by: parameters that get their own line, comma-separated.
        x: parameter on the x axis of plots over devices.
        predict: add the oracle's predictions.
        metric: the metric of ``history``; else the step time.
    """

    where: str | None = None
    by: str | None = None
    x: str | None = None
    predict: bool = False
    metric: str | None = None


def plot_results(
    kind: str, tree: ResultsTree, sources: Sequence[str], clusters: Sequence[str] | None, options: PlotOptions
) -> Plot:
    """Draw the results of ``sources``, as in ``load``, on ``clusters``; ``tree`` is the tree of the sweeps."""
    where, by, x, predict, metric = options
    if x is not None and not plot_kind(kind).title.endswith(OVER_DEVICES):
        kinds = [name for name, entry in PLOTS.items() if entry.title.endswith(OVER_DEVICES)]
        raise ConfigError(f"--x: the plot {kind} has its own axis", hint=f"choices: {', '.join(kinds)}")
    if x not in (None, DEVICES) and predict:
        raise ConfigError("--x: predictions are lines over devices", hint="leave out --x or --predict")
    if metric is not None and kind != "history":
        raise ConfigError(f"--metric: the plot {kind} has its own", hint="history shows any metric")
    column = comparison_metric(metric) if metric is not None else STEP_TIME
    keys = tuple(resolve_column(name.strip()) for name in by.split(",")) if by is not None else ()
    condition = Condition(where, "--where") if where is not None else None
    columns = [*plot_columns(kind), *source_columns([*keys, column]), *(condition.columns if condition else [])]
    columns += [*SPEC_COLUMNS] if x else []

    def load_full(wanted: Sequence[tuple[str, str]]) -> Iterable[RunResult]:
        return full_results(tree, sources, clusters, wanted)

    if not predict:
        frame = filter_launches(load_frame(tree, sources, clusters, columns), condition)
        x_column = _x_column(x, frame) if x and len(ok_results(frame)) else DEVICES
        return draw_plot(kind, with_own_metrics(frame, [column]), PlotRequest(keys, load_full, None, column, x_column))
    # Imported here: plots without predictions need no oracle.
    from hpcbench.predict.cluster_forecasts import ClusterForecasts
    from hpcbench.report.prediction_frames import measured_vs_predicted_frame, predicted_scaling_frame

    frame = filter_launches(load_frame(tree, sources, clusters, [*columns, *SPEC_COLUMNS]), condition)
    predicted_frame = predicted_scaling_frame if kind == "scaling" else measured_vs_predicted_frame
    return draw_plot(kind, frame, PlotRequest(keys, load_full, predicted_frame(frame, ClusterForecasts(tree), keys)))


def plot(
    kind: str, *sources: str | Path, results: str | Path | None = None, clusters: Sequence[str] | None = None,
    where: str | None = None, by: str | None = None, x: str | None = None, predict: bool = False,
    metric: str | None = None,
) -> Any:  # fmt: skip
    """Return the plot ``hpcbench plot KIND`` as an altair chart, which a notebook shows.

        hpcbench.plot("scaling", "quickstart", where="nodes > 1")

    Args:
        kind: name of the plot: ``hpcbench plot`` lists them.
        sources: as in ``load``.
        results: the tree of the sweeps; else ``$HPCBENCH_RESULTS``, else ``results``.
        clusters: only these.
        where: a condition on runs.
        by: parameters that get their own line, comma-separated.
        x: parameter on the x axis of plots over devices.
        predict: add the oracle's predictions.
        metric: the metric of ``history``; else the step time.

    Raises:
        HpcbenchError: there is no such plot, source or column, nothing to draw, or altair is missing.
    """
    tree = ResultsTree(results_folder(str(results) if results is not None else None))
    drawn = plot_results(kind, tree, [*map(str, sources)], clusters, PlotOptions(where, by, x, predict, metric))
    if drawn.nothing:
        raise ConfigError(f"{kind}: nothing to draw: {drawn.nothing}")
    return _import_package("altair", "altair").Chart.from_dict(plot_specification(drawn))


def plot_columns(name: str) -> list[str]:
    """The columns of a results frame that the picture ``name`` is made from."""
    return list(dict.fromkeys([*POINT_COLUMNS, *plot_kind(name).columns]))


PLOT_SUFFIXES = (".html", ".json", ".pdf", ".png", ".svg")
_PIXELS_PER_INCH = 200


def check_plot_suffix(path: Path) -> None:
    """Raises ``ConfigError`` where a picture cannot be written as a file called ``path``."""
    if path.suffix not in PLOT_SUFFIXES:
        raise ConfigError(
            f"cannot draw {path}: unknown ending {path.suffix!r}", hint=did_you_mean(path.suffix, PLOT_SUFFIXES)
        )


def save_plot(picture: Plot, path: Path) -> None:
    """Write ``picture`` in the format that the file's ending names.

    Raises ``ConfigError`` for another ending, for a picture of nothing, and where altair or vl-convert is missing.
    """
    check_plot_suffix(path)
    if picture.drawing is None:
        raise ConfigError(f"{picture.name}: nothing to draw: {picture.nothing}")
    write_atomic(path, encode_plot(picture, path.suffix))


def encode_plot(picture: Plot, ending: str) -> bytes:
    """The bytes of a file with ``ending``."""
    specification = _build_specification(picture)
    if ending == ".json":
        text = msgspec.json.format(msgspec.json.encode(specification), indent=1).decode()
        return escape_control_characters(text).encode() + b"\n"
    convert = _import_package("vl_convert", "vl-convert-python")
    if ending == ".html":
        # Within a script's text only "<" could end it.
        specification.pop("$schema")
        data = escape_control_characters(msgspec.json.encode(specification).decode())
        template = jinja2.Template(_PAGE_TEMPLATE.read_text(encoding="utf-8"), autoescape=True)
        scripts = convert.javascript_bundle()
        page: str = template.render(plot=picture, data=data.replace("<", "\\u003c"), scripts=scripts)
        return page.encode() + b"\n"
    if ending == ".svg":
        return svg_of(specification)
    if ending == ".png":
        return bytes(convert.vegalite_to_png(specification, ppi=_PIXELS_PER_INCH, **_FETCHES_NOTHING))
    return bytes(convert.vegalite_to_pdf(specification, **_FETCHES_NOTHING))


_FETCHES_NOTHING: dict[str, Any] = {"allowed_base_urls": []}
"""Without addresses nothing can be fetched, whatever a specification says."""


def svg_of(specification: dict[str, Any]) -> bytes:
    """The picture of a Vega-Lite specification. Raises ``ConfigError`` where vl-convert is missing."""
    convert = _import_package("vl_convert", "vl-convert-python")
    return str(convert.vegalite_to_svg(specification, **_FETCHES_NOTHING)).encode()


_PAGE_TEMPLATE = Path(__file__).with_name("plot.html.j2")


def plot_specification(plot: Plot) -> dict[str, Any]:
    """The Vega-Lite specification of ``plot`` with its rows inside, without the address of its schema.

    Empty where there is nothing to draw. Raises ``ConfigError`` where altair is missing.
    """
    specification = _build_specification(plot)
    specification.pop("$schema", None)
    return specification


def _build_specification(plot: Plot) -> dict[str, Any]:
    if plot.drawing is None:
        return {}
    _import_package("altair", "altair")
    charts = importlib.import_module("hpcbench.report.plots.altair_charts")
    specification: dict[str, Any] = charts.plot_specification(plot)
    return specification


def can_draw_files() -> bool:
    """Whether the packages are there that plots as files, and in pages, need."""
    try:
        _import_package("altair", "altair")
        _import_package("vl_convert", "vl-convert-python")
    except ConfigError:
        return False
    return True


def _import_package(module: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"plots as files need the package {name}", hint=f"install it with: {INSTALL_REPORT}"
        ) from None
