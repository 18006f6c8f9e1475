"""Forecasts for the clusters whose results lie in one tree."""

from __future__ import annotations

from pathlib import Path

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import HpcbenchError
from hpcbench.predict.calibration.calibration_store import read_calibrations
from hpcbench.predict.forecast import Forecast, has_cost
from hpcbench.predict.machine import Machine
from hpcbench.predict.prediction import NotPredicted, Prediction
from hpcbench.results.results_tree import ResultsTree


class ClusterForecasts:
    """One forecast per cluster, made when it is first used."""

    def __init__(self, results: ResultsTree, model_folder: Path | None = None) -> None:
        """Custom models in ``model_folder`` may be run; without it only their stored tables are used."""
        self._results, self._model_folder = results, model_folder
        self._forecasts: dict[str, Forecast | NotPredicted] = {}
        self._fitted: dict[str, frozenset[str]] = {}

    def forecast(self, cluster: str) -> Forecast | NotPredicted:
        """Return the forecast for a cluster, or the reason why its profile cannot be read."""
        if cluster not in self._forecasts:
            try:
                profile, _ = load_cluster(cluster)
                tree = self._results.cluster(cluster)
                self._forecasts[cluster] = Forecast(profile, tree, self._model_folder, untrusted=True)
            except HpcbenchError as error:
                self._forecasts[cluster] = NotPredicted(error.message)
        return self._forecasts[cluster]

    def predict(self, cluster: str, spec: RunSpec) -> Prediction | NotPredicted:
        """Return ``Forecast.predict`` without the results of the run's own configuration."""
        forecast = self.forecast(cluster)
        return forecast if isinstance(forecast, NotPredicted) else forecast.predict(spec, held_out=True)

    def has_formulas(self, cluster: str, spec: RunSpec) -> bool:
        """Whether the oracle prices runs of this strategy, or of this command."""
        forecast = self.forecast(cluster)
        return has_cost(spec) if isinstance(forecast, NotPredicted) else forecast.has_formulas(spec)

    def fitted_from(self, cluster: str, spec: RunSpec) -> frozenset[str]:
        """Return the ids of runs that the numbers behind a prediction were fitted to."""
        forecast = self.forecast(cluster)
        if isinstance(forecast, NotPredicted):
            return frozenset()
        source = forecast.machine(spec).source
        if source not in self._fitted:
            stored, _ = read_calibrations(self._results.cluster(cluster), cluster)
            used = [entry.calibration.run_ids for entry in stored if entry.digest in source]
            self._fitted[source] = frozenset(run_id for run_ids in used for run_id in run_ids)
        return self._fitted[source]

    def machines(self) -> list[Machine]:
        """Return the machines that predictions were made with."""
        forecasts = [forecast for forecast in self._forecasts.values() if isinstance(forecast, Forecast)]
        return [machine for forecast in forecasts for machine in forecast.machines()]
