"""Writes the dashboards for Grafana: `grafana_dashboards.py` makes `deploy/grafana/*.json`.

A dashboard is a table of panels, a panel its queries. tests/dashboards holds each query to the
metrics that the trainer and a server serve. Standard library only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "deploy" / "grafana"
_SOURCE = {"type": "prometheus", "uid": "${source}"}
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3
_OF = 'instance=~"$instance"'
_SCHEMA_VERSION = 39  # Grafana 11; later ones convert it, and 10 and before refuse it


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart.

    Attributes:
        title: What is shown, with its unit in words where Grafana has none.
        queries: Legend to query; `OF` stands for the chosen instances.
        unit: One of Grafana's names.
        kind: `timeseries`, `stat` or `state-timeline`.
    """

    title: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"


def _steps(**legends: str) -> dict[str, str]:
    """Returns a query per legend of a metric of the step, as Prometheus names it."""
    return {legend: f"treadle_step_{name}{{OF}}" for legend, name in legends.items()}


TRAINING = (
    Panel("Step", {"{{instance}}": "treadle_trainer_step{OF}"}, kind="stat"),
    Panel(
        "Seconds since the last step",
        {"{{instance}}": "time() - treadle_trainer_last_step_timestamp_seconds{OF}"},
        unit="s",
        kind="stat",
    ),
    Panel(
        "Alerts",
        {"{{name}}": "treadle_alert{OF}"},
        kind="state-timeline",
    ),
    Panel("Reward", _steps(mean="reward_mean", min="reward_min", max="reward_max")),
    Panel("Reward, held-out", _steps(reward="val_reward", accuracy="val_accuracy")),
    Panel("Groups with signal", _steps(share="groups_with_signal"), unit="percentunit"),
    Panel("Entropy, nats per token", _steps(entropy="actor_entropy")),
    Panel("Norm of the gradient", _steps(norm="actor_grad_norm")),
    Panel(
        "Servers against policy, nats",
        _steps(mean="rollout_logprob_diff_mean", p99="rollout_logprob_diff_p99", KL="rollout_kl"),
    ),
    Panel(
        "Drift, share of the turns",
        {
            kind: f"treadle_step_drift_{kind}{{OF}} / on(instance) treadle_step_drift_turns{{OF}}"
            for kind in ("sampled", "observed")
        },
        unit="percentunit",
    ),
    Panel(
        "Time of a step by phase",
        _steps(
            rollout="time_rollout_seconds",
            train="time_train_seconds",
            sync="time_sync_seconds",
            validate="time_validate_seconds",
            save="time_save_seconds",
        ),
        unit="s",
    ),
    Panel("Phase", {"{{phase}}": "treadle_trainer_phase{OF} == 1"}, kind="state-timeline"),
    Panel(
        "Long tail: a trajectory's completions",
        _steps(
            mean="agent_loop_generate_seconds",
            max="agent_loop_generate_max_seconds",
            slowest="agent_loop_slowest_generate_seconds",
        ),
        unit="s",
    ),
    Panel(
        "Long tail: a trajectory's tools",
        _steps(
            mean="agent_loop_tool_calls_seconds",
            max="agent_loop_tool_calls_max_seconds",
            slowest="agent_loop_slowest_tool_calls_seconds",
        ),
        unit="s",
    ),
    Panel("Trajectories not ended", {"{{instance}}": "treadle_trainer_trajectories_pending{OF}"}),
    Panel(
        "Trajectories per minute",
        {"{{phase}} {{outcome}}": "60 * rate(treadle_trainer_trajectories_total{OF}[5m])"},
    ),
    Panel(
        "Tokens per second",
        {
            "sampled": "rate(treadle_trainer_sampled_tokens_total{OF}[5m])",
            "trained": "rate(treadle_trainer_trained_tokens_total{OF}[5m])",
        },
    ),
    Panel(
        "Tool calls that failed",
        _steps(failures="tool_failures", timeouts="tool_timeouts", unknown="tool_unknown"),
    ),
    Panel(
        "What the servers' time went to",
        _steps(
            **{
                cause: f"servers_time_share_{cause}"
                for cause in (
                    *("prefill", "decode", "tools", "training", "prompts"),
                    *("weights", "memory", "down"),
                )
            }
        ),
        unit="percentunit",
    ),
    Panel(
        "Time in which the least and the most busy server work",
        _steps(least="servers_busy_min", most="servers_busy_max"),
        unit="percentunit",
    ),
    Panel(
        "What the policy ranks' time went to",
        _steps(
            **{
                cause: f"policy_time_share_{cause}"
                for cause in ("train", "optimizer", "logprobs", "weights", "save", "rollout")
            }
        ),
        unit="percentunit",
    ),
)

SERVERS = (
    Panel("Serving", {"{{instance}}": 'treadle_server_state{OF,state="serving"}'}, kind="stat"),
    Panel(
        "State", {"{{instance}} {{state}}": "treadle_server_state{OF} == 1"}, kind="state-timeline"
    ),
    Panel(
        "Versions behind the newest",
        {"{{instance}}": "scalar(max(treadle_weight_version{OF})) - treadle_weight_version{OF}"},
    ),
    Panel(
        "What the servers' time goes to",
        {"{{cause}}": "avg by (cause) (rate(treadle_server_seconds_total{OF}[5m]))"},
        unit="percentunit",
    ),
    Panel("Tokens per second", {"{{instance}}": "rate(treadle_sampled_tokens_total{OF}[1m])"}),
    Panel("Completions in the engine", {"{{instance}}": "treadle_completions_running{OF}"}),
    Panel("Completions that wait", {"{{instance}}": "treadle_completions_queued{OF}"}),
    Panel(
        "Completions per second by outcome",
        {"{{outcome}}": "sum by (outcome) (rate(treadle_completions_total{OF}[5m]))"},
    ),
    Panel(
        "Wait for a slot, 95th percentile",
        {
            "{{instance}}": "histogram_quantile(0.95, sum by (instance, le) "
            "(rate(treadle_queue_seconds_bucket{OF}[5m])))"
        },
        unit="s",
    ),
    Panel(
        "Time in the engine, 95th percentile",
        {
            "{{instance}}": "histogram_quantile(0.95, sum by (instance, le) "
            "(rate(treadle_engine_seconds_bucket{OF}[5m])))"
        },
        unit="s",
    ),
    Panel(
        "Share of prompts from the cache",
        {
            "{{instance}}": "rate(treadle_cached_prompt_tokens_total{OF}[5m]) "
            "/ rate(treadle_prompt_tokens_total{OF}[5m])"
        },
        unit="percentunit",
    ),
    Panel(
        "Generation stopped for new weights, share of the time",
        {"{{instance}}": "rate(treadle_weight_switch_seconds_sum{OF}[5m])"},
        unit="percentunit",
    ),
    Panel(
        "Weight updates by outcome",
        {"{{outcome}}": "sum by (outcome) (increase(treadle_weight_updates_total{OF}[5m]))"},
    ),
    Panel(
        "Weight bytes per second",
        {"{{instance}}": "rate(treadle_weight_update_bytes_total{OF}[5m])"},
        unit="Bps",
    ),
    Panel(
        "Memory of the process", {"{{instance}}": "process_resident_memory_bytes{OF}"}, unit="bytes"
    ),
    Panel("Processor time", {"{{instance}}": "rate(process_cpu_seconds_total{OF}[1m])"}),
)


def dashboard(uid: str, title: str, panels: tuple[Panel, ...], *, instances: str) -> dict[str, Any]:
    """Returns a dashboard as Grafana imports it.

    Args:
        uid: Under which a newer version replaces an older one.
        title: Its name in Grafana.
        panels: Laid out in rows of three.
        instances: The metric whose instances can be chosen.
    """
    return {
        "uid": uid,
        "title": title,
        "tags": ["treadle"],
        "schemaVersion": _SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "source",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                },
                {
                    "name": "instance",
                    "label": "Instance",
                    "type": "query",
                    "datasource": _SOURCE,
                    "query": {"query": f"label_values({instances}, instance)", "refId": "instance"},
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".+",
                },
            ]
        },
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, _COLUMNS)
    return {
        "id": number + 1,
        "type": panel.kind,
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": row * _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": query.replace("OF", _OF),
                "legendFormat": legend,
            }
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def dashboards() -> dict[str, dict[str, Any]]:
    """Returns all dashboards by the name of their file."""
    return {
        "training.json": dashboard(
            "treadle-training", "Treadle: training", TRAINING, instances="treadle_trainer_info"
        ),
        "servers.json": dashboard(
            "treadle-servers", "Treadle: rollout servers", SERVERS, instances="treadle_server_info"
        ),
    }


def text_of(content: dict[str, Any]) -> str:
    """Returns a dashboard as its file holds it."""
    return json.dumps(content, indent=2) + "\n"


if __name__ == "__main__":
    for name, content in dashboards().items():
        (FOLDER / name).write_text(text_of(content))
