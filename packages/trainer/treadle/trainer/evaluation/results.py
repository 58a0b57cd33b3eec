"""The results of an evaluation, as `results.json` holds them.

Invariant: the file names the model, the data, the sampling settings, the package versions and the
scores, so it can be compared with another one without the rest of its directory.
"""

import datetime
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from treadle.agent_loop import Trajectory
from treadle.agent_loop.rpc import ServerInfo
from treadle.trainer.config.schema import Config
from treadle.trainer.evaluation.scores import Scores, score
from treadle.trainer.evaluation.source import Source
from treadle.trainer.report import rollout_metrics, validation_metrics
from treadle.trainer.report.failures import causes

__all__ = ["RESULTS", "Results", "make_results"]

RESULTS = "results.json"
"""The file's name."""
_FORMAT = 1
_PACKAGES = ("treadle-trainer", "treadle-agent-loop", "treadle-tools", "transformers")
_SUCCESS = "accuracy 1: a right answer; a failed trajectory is none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The results of an evaluation.

    Attributes:
        scores: Per data source, and of all rows last.
        failures: The causes of failed trajectories, most frequent first.
        weight_versions: The versions that sampled a token; several if the server got new weights
            meanwhile.
        record: All of it, and what was evaluated and how, ready for JSON.
    """

    scores: Sequence[Scores]
    failures: tuple[str, ...]
    weight_versions: tuple[int, ...]
    record: Mapping[str, object]


def make_results(
    config: Config,
    source: Source,
    trajectories: Sequence[Trajectory],
    *,
    servers: Sequence[ServerInfo],
    began: datetime.datetime,
) -> Results:
    """Returns the results of all trajectories.

    Args:
        began: When the evaluation began, with its time zone.
    """
    rollout, run = config.rollout, config.run
    scores, failures = score(trajectories), tuple(causes(trajectories))
    versions = _weight_versions(trajectories)
    record = {
        "format": _FORMAT,
        "source": {
            "name": source.text,
            "model": source.api_model
            or (None if source.address is not None else str(config.model.path)),
            "run": None if source.run is None else str(source.run),
            "step": source.step,
            "address": source.address or source.url,
        },
        "servers": [_server(server) for server in servers],
        "weight_versions": versions,
        "data": {"files": list(map(str, config.data.val_files)), "rows": scores[-1].rows},
        "sampling": {
            "samples_per_prompt": rollout.val.samples_per_prompt,
            "temperature": rollout.val.temperature,
            "top_p": rollout.val.top_p,
            "top_k": rollout.val.top_k,
            "min_p": rollout.val.min_p,
            "prompt_length": rollout.prompt_length,
            "response_length": rollout.response_length,
            "seed": run.seed,
        },
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in _PACKAGES},
        },
        "began": began.isoformat(timespec="seconds"),
        "seconds": (datetime.datetime.now().astimezone() - began).total_seconds(),
        "success": _SUCCESS,
        "scores": [asdict(each) for each in scores],
        "metrics": {**rollout_metrics(trajectories), **validation_metrics(trajectories)},
        "failures": failures,
    }
    return Results(scores=scores, failures=failures, weight_versions=versions, record=record)


def _weight_versions(trajectories: Sequence[Trajectory]) -> tuple[int, ...]:
    runs = (run for each in trajectories for sample in each.samples for run in sample.runs())
    return tuple(sorted({version for *_, version in runs if version is not None}))


def _server(server: ServerInfo) -> Mapping[str, object]:
    return {
        "address": server.address,
        "version": server.server_version,
        "engine": server.engine,
        "engine_version": server.engine_version,
        "architecture": server.architecture,
        "weight_version": server.weight_version,
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "source"
