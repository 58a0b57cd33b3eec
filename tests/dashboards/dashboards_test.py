"""The dashboards of deploy/grafana ask for what the trainer and a server serve.

Grafana itself is not among the tests: no package index has it under a licence that we can use.
What its importer needs of a dashboard is checked here instead.
"""

import asyncio
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_dashboards import dashboards, text_of
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.observability.metrics import ReplicaCollector
from treadle.rollout_server.observability.server_stats import ServerStats
from treadle.rollout_server.replica import Replica
from treadle.trainer.config.schema import AnyRunConfig
from treadle.trainer.report.prometheus import prometheus_name, serve_run_metrics

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy" / "grafana").glob("*.json"))


def _documented() -> Iterator[str]:
    """Yields the metrics of a step; tests/e2e holds the page to what a run writes."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    cells = "".join(re.findall(r"^\|([^|]*)\|", text, re.MULTILINE))
    yield from re.findall(r"`([\w/]+)`", cells)


def _names(text: str) -> set[str]:
    """Returns the names of the samples, also of counters that have counted nothing by now."""
    names = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
    for family in text_string_to_metric_families(text):
        names |= {sample.name for sample in family.samples}
    return names


async def _served() -> set[str]:
    """Returns every name that a trainer and a server serve."""
    with serve_run_metrics(AnyRunConfig(metrics_port=0)) as (metrics, url):
        metrics.step_done(1, dict.fromkeys(_documented(), 1.0))
        assert url is not None
        answer = await asyncio.to_thread(urllib.request.urlopen, url)
        trainer = _names(answer.read().decode())
    registry = CollectorRegistry()
    replica, stats = Replica(ServerConfig(), asyncio.get_running_loop()), ServerStats()
    registry.register(ReplicaCollector(replica, stats))
    return trainer | _names(generate_latest(registry).decode())


def _asked(query: str) -> set[str]:
    return set(re.findall(r"\b(?:treadle|process)_\w+", query))


def _queries(board: dict[str, Any]) -> Iterator[str]:
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (v["query"]["query"] for v in board["templating"]["list"] if v["type"] == "query")


@pytest.mark.asyncio
async def test_every_query_asks_for_what_is_served() -> None:
    served = await _served()
    asked: set[str] = set()
    for path in FILES:
        for query in _queries(json.loads(path.read_text())):
            assert _asked(query), query
            asked |= _asked(query)
    assert len(asked) > 40
    assert asked - served == set()
    alerts = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())
    for rule in alerts["groups"][0]["rules"]:
        assert _asked(rule["expr"]) <= served


def test_the_files_are_what_the_script_makes() -> None:
    made = dashboards()
    assert [path.name for path in FILES] == sorted(made)
    for path in FILES:
        assert path.read_text() == text_of(made[path.name]), (
            f"{path} is not current: run build-support/grafana_dashboards.py"
        )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_grafana_can_import_it(path: Path) -> None:
    board = json.loads(path.read_text())
    assert re.fullmatch(r"[\w-]{1,40}", board["uid"])
    assert isinstance(board["schemaVersion"], int)
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["source"]["type"] == "datasource"
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["type"] in {"timeseries", "stat", "state-timeline"}
        assert panel["title"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        taken |= cells
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
        for target in panel["targets"]:
            assert (
                target["datasource"]
                == panel["datasource"]
                == {
                    "type": "prometheus",
                    "uid": "${source}",
                }
            )
            # A variable that the dashboard does not have would be sent as it is written.
            assert set(re.findall(r"\$\{?(\w+)", target["expr"])) == {"instance"}


def test_a_step_metric_is_named_by_the_rules_of_prometheus() -> None:
    assert prometheus_name("time/rollout_s") == "treadle_step_time_rollout_seconds"
    assert prometheus_name("agent_loop/generate_max_s").endswith("_generate_max_seconds")
    assert prometheus_name("val/gsm8k/accuracy/mean@8").endswith("val_gsm8k_accuracy_mean_at_8")
    assert prometheus_name("sync/bytes") == "treadle_step_sync_bytes"
