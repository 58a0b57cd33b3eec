"""The main job, end to end: every process real, over gRPC, on the demo's model."""

from collections.abc import Callable

import pytest

from .conftest import Trainer

pytestmark = pytest.mark.timeout(180)
Train = Callable[..., Trainer]


@pytest.mark.parametrize("transport", ["inline", "file"])
def test_a_run_does_what_was_asked_and_leaves_its_story(train: Train, transport: str) -> None:
    trainer = train(f"sync.transport={transport}", "rollout.num_replicas=2")
    before, first, last = trainer.metrics()
    assert [line["step"] for line in (before, first, last)] == [0, 1, 2]
    assert "val/accuracy" in before
    assert "val/accuracy" not in first
    assert "val/accuracy" in last
    for line in (first, last):
        assert 0 <= line["reward/mean"] <= 1
        assert 0 <= line["tool/call_rate"] <= 1
        assert line["rollout/num_trajectories"] == 16
        assert line["rollout/num_failed"] == 0
        assert line["weights/version"] == line["step"]
        assert line["tokens/sampled"] > 0
        assert line["actor/grad_norm"] >= 0
        phases = sum(line[f"time/{name}_s"] for name in ("rollout", "train", "sync"))
        assert 0 < phases <= line["time/step_s"]
        # Trainer and server compute the same probabilities, after the weights moved too.
        assert line["rollout/logprob_diff_max"] < 1e-3
    for name in ("config.json", "curves.png", "report.html", "trajectories.jsonl"):
        assert (trainer.run_dir / name).stat().st_size > 0
    weights = trainer.run_dir / "weights"
    assert not weights.exists() or not list(weights.iterdir())


def test_sampled_tokens_name_the_weights_that_sampled_them(train: Train) -> None:
    trainer = train()
    for line in trainer.trajectories():
        versions = {
            span["weight_version"]
            for span in line["tokens"]["spans"]
            if span["origin"] == "sampled"
        }
        expected = line["step"] if line["phase"] == "val" else line["step"] - 1
        assert versions == {expected}


def test_the_saved_configuration_repeats_the_run(train: Train) -> None:
    first = train("schedule.val_every=null", "schedule.val_before_train=false")
    again = train(
        "--config", str(first.run_dir / "config.json"), name="again", base=()
    )
    for one, two in zip(first.metrics(), again.metrics(), strict=True):
        assert one["reward/mean"] == two["reward/mean"]
        assert one["actor/loss"] == pytest.approx(two["actor/loss"], abs=1e-5)


@pytest.mark.parametrize("parallel", ["tensor", "data"])
def test_parallel_ranks_learn_what_one_process_learns(train: Train, parallel: str) -> None:
    common = ("schedule.val_every=null", "schedule.val_before_train=false")
    alone = train(*common, name="alone")
    together = train(*common, f"policy.parallel.{parallel}=2", name="together")
    for one, two in zip(alone.metrics(), together.metrics(), strict=True):
        assert one["reward/mean"] == two["reward/mean"]
        assert one["actor/loss"] == pytest.approx(two["actor/loss"], abs=1e-5)
        assert one["actor/grad_norm"] == pytest.approx(two["actor/grad_norm"], rel=1e-3)


def test_ray_runs_the_same_processes(train: Train) -> None:
    common = ("schedule.val_every=null", "schedule.val_before_train=false")
    local = train(*common, name="local")
    ray = train(*common, "launch=ray", name="ray")
    for one, two in zip(local.metrics(), ray.metrics(), strict=True):
        assert one["reward/mean"] == two["reward/mean"]
        assert one["actor/loss"] == pytest.approx(two["actor/loss"], abs=1e-5)
