"""The endpoint of a run, scraped over HTTP and read with Prometheus' own parser."""

import contextlib
import math
import urllib.request

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from treadle.agent_loop import SetupError
from treadle.trainer.config.schema import AnyRunConfig
from treadle.trainer.report.prometheus import RunMetrics, prometheus_name, serve_run_metrics
from treadle.trainer.report.terminal.progress import PlainProgress
from treadle.trainer.training_loop.run_record import RunRecord

Samples = dict[tuple[str, tuple[str, ...]], float]


def samples(text: str) -> Samples:
    """Returns the samples by name and values of the labels, in the order of the labels' names."""
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(url: str) -> Samples:
    with urllib.request.urlopen(url) as answer:
        return samples(answer.read().decode())


def test_a_run_is_scraped_while_it_trains() -> None:
    with (
        serve_run_metrics(AnyRunConfig(metrics_port=0, project="p", name="n")) as (metrics, url),
        contextlib.closing(open("/dev/null", "w")) as nowhere,
    ):
        assert url is not None
        assert url.startswith("http://127.0.0.1:")
        progress = PlainProgress(total_steps=2, stream=nowhere)
        record = RunRecord(progress, metrics, total_steps=2)
        with record.phase("rollout", total=8):
            record.advance(3)
            found = scrape(url)
            assert found["treadle_trainer_phase", ("rollout",)] == 1
            assert found["treadle_trainer_phase", ("train",)] == 0
            assert found["treadle_trainer_trajectories_pending", ()] == 5
            assert math.isnan(found["treadle_trainer_last_step_timestamp_seconds", ()])
        for step in (1, 2):
            values = {"reward/mean": step / 4, "rollout/num_trajectories": 8.0, "time/step_s": 2.0}
            validation = {"val/gsm8k/accuracy/mean@2": 0.5} if step == 1 else {}
            counted = {"rollout/num_failed": 1.0, "tokens/sampled": 100.0}
            record.show_step(step, {**values, **validation, **counted})
        metrics.set_alerts({"drift"})
        found = scrape(url)
    assert found["treadle_trainer_info", ("p", "n")] == 1
    assert found["treadle_trainer_step", ()] == 2
    assert found["treadle_trainer_last_step_timestamp_seconds", ()] > 1.7e9
    assert found["treadle_trainer_phase", ("rollout",)] == 0
    assert found["treadle_trainer_trajectories_total", ("ended", "train")] == 14
    assert found["treadle_trainer_trajectories_total", ("failed", "train")] == 2
    assert found["treadle_trainer_sampled_tokens_total", ()] == 200
    assert found["treadle_step_reward_mean", ("reward/mean",)] == 0.5
    assert found["treadle_step_time_step_seconds", ("time/step_s",)] == 2
    # It stays until the next validation.
    name = "val/gsm8k/accuracy/mean@2"
    assert found["treadle_step_val_gsm8k_accuracy_mean_at_2", (name,)] == 0.5
    assert found["treadle_alert", ("drift",)] == 1
    assert found["treadle_alert", ("idle",)] == 0
    assert ("process_cpu_seconds_total", ()) in found
    with pytest.raises(OSError, match="refused"):
        scrape(url)


def test_nothing_listens_unless_it_is_asked_to() -> None:
    with serve_run_metrics(AnyRunConfig()) as (_, url):
        assert url is None


def test_a_port_that_is_taken_is_named() -> None:
    with serve_run_metrics(AnyRunConfig(metrics_port=0)) as (_, url):
        assert url is not None
        port = int(url.split(":")[2].removesuffix("/metrics"))
        with (
            pytest.raises(SetupError, match=rf"run.metrics_port={port}: .*in use; choose another"),
            serve_run_metrics(AnyRunConfig(metrics_port=port)),
        ):
            pass


_NAMES = st.text(st.sampled_from('aA0_/@-. é\n"\\{}'), max_size=12)


@settings(max_examples=50)
@given(st.dictionaries(_NAMES, st.floats(), max_size=6))
def test_whatever_a_tool_reports_can_be_scraped(values: dict[str, float]) -> None:
    metrics = RunMetrics(project='"\\\n', name="")
    metrics.step_done(1, values)
    registry = CollectorRegistry()
    registry.register(metrics)
    found = samples(generate_latest(registry).decode())
    for metric, value in values.items():
        assert found[prometheus_name(metric), (metric,)] == pytest.approx(value, nan_ok=True)
