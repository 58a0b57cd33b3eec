"""MLflow: logs to MLFLOW_TRACKING_URI, or else to `mlflow.db` and `mlartifacts/` of the run.

The project is the experiment. MLflow chooses its run ids, so a tag identifies a resumed run.
"""

import math
import os
import re
import time
from collections.abc import Mapping
from typing import Final

from treadle.trainer.config.keys import flatten
from treadle.trainer.loggers.run_logger import End, LoggedRun, Table

__all__ = ["Logger"]

_STATUS: Final[Mapping[str, str]] = {
    "finished": "FINISHED",
    "failed": "FAILED",
    "interrupted": "KILLED",
}
_TAG: Final = "treadle.run_id"
_LONGEST: Final = 6000
"""Characters of a parameter that MLflow takes."""
_MOST: Final = 100
"""Parameters that MLflow takes at a time."""


class Logger:
    """See `RunLogger`."""

    def __init__(self, run: LoggedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        uri, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:
            uri, artifacts = f"sqlite:///{run.directory}/mlflow.db", f"{run.directory}/mlartifacts"
        self._client = MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(run.project)
        experiment = (
            self._client.create_experiment(run.project, artifact_location=artifacts)
            if found is None
            else found.experiment_id
        )
        runs = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{run.id}'")
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(
            experiment, run_name=run.name, tags={_TAG: run.id}
        ).info.run_id
        params = [Param(key, str(value)[:_LONGEST]) for key, value in flatten(run.config).items()]
        for start in range(0, len(params), _MOST):
            self._client.log_batch(self._id, params=params[start : start + _MOST])

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """See `RunLogger`; `@` becomes `_at_` in a name, and what is not finite is left out."""
        now = int(time.time() * 1000)
        self._client.log_batch(
            self._id,
            metrics=[
                self._metric(_name(name), value, now, step)
                for name, value in values.items()
                if math.isfinite(value)
            ],
        )

    def table(self, step: int, table: Table) -> None:
        """Writes the table as an artifact, in the form of MLflow's tables."""
        content = {"columns": list(table.columns), "data": [list(row) for row in table.rows]}
        self._client.log_dict(self._id, content, f"{table.name}/step-{step:08d}.json")

    def alert(self, step: int, name: str, text: str) -> None:
        """Sets the tag `alert.<name>`: MLflow has no alerts. The last one of a name stays."""
        self._client.set_tag(self._id, f"alert.{name}", f"step {step}: {text}")

    def finish(self, end: End, summary: Mapping[str, float]) -> None:
        """See `RunLogger`; the summary becomes tags."""
        for name, value in summary.items():
            self._client.set_tag(self._id, f"summary.{_name(name)}", f"{value:g}")
        self._client.set_terminated(self._id, status=_STATUS[end])


def _name(name: str) -> str:
    """Returns the name in the characters that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))
