"""The tables of metrics in docs/operations.md are what a server and a trainer tell."""

import asyncio
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.observability.metrics import ReplicaCollector
from treadle.rollout_server.observability.server_stats import ServerStats
from treadle.rollout_server.replica import Replica
from treadle.trainer.report.prometheus import RunMetrics

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


@pytest.mark.asyncio
async def test_the_metrics_tables_are_whole() -> None:
    registry = CollectorRegistry()
    registry.register(RunMetrics(project="p", name="n"))
    replica = Replica(ServerConfig(), asyncio.get_running_loop())
    registry.register(ReplicaCollector(replica, ServerStats()))
    told = set(re.findall(r"^# TYPE (\w+)", generate_latest(registry).decode(), re.MULTILINE))
    written = set(re.findall(r"^\| `(treadle_\w+)[`{]", PAGE.read_text(), re.MULTILINE))
    assert written == told
