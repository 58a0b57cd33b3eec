"""Training end to end: all processes real, over gRPC, with the demo's model."""

from collections.abc import Callable

import pytest

from .testing import Trainer

pytestmark = pytest.mark.timeout(600)
Train = Callable[..., Trainer]


def _check_versions(trainer: Trainer) -> None:
    """Checks that sampled tokens name the weight version that sampled them."""
    for line in trainer.trajectories():
        spans = [span for span in line["samples"][-1]["spans"] if span["origin"] == "sampled"]
        expected = line["step"] if line["phase"] == "val" else line["step"] - 1
        assert {span["weight_version"] for span in spans} == {expected}


@pytest.mark.parametrize(
    "arguments",
    [
        ("sync.transport=inline", "rollout.num_replicas=2", "rollout.cache_tokens=2000"),
        ("sync.transport=file", "rollout.temperature=0.7"),
        ("sync.transport=shared_memory", "sync.in_place=true", "policy.parallel.pipeline=2"),
        ("sync.transport=collective", "policy.parallel.pipeline=2", "rollout.num_replicas=2"),
    ],
    ids=["inline", "file", "shared memory, two senders", "collective, two senders"],
)
def test_a_run_trains_validates_and_writes_its_files(
    train: Train, arguments: tuple[str, ...]
) -> None:
    trainer = train(*arguments)
    before, first, last = trainer.metrics()
    assert [line["step"] for line in (before, first, last)] == [0, 1, 2]
    assert "val/reward" in before
    assert "val/reward" not in first
    assert "val/reward" in last
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
        # Trainer and server compute the same probabilities, at any temperature and after the
        # weights have changed.
        assert line["rollout/logprob_diff_max"] < 1e-3
    for name in ("config.json", "curves.png", "report.html", "trajectories.jsonl"):
        assert (trainer.run_dir / name).stat().st_size > 0
    _check_versions(trainer)
    weights = trainer.run_dir / "weights"
    assert not weights.exists() or not list(weights.iterdir())


_NO_VALIDATION = ("schedule.val_every=null", "schedule.val_before_train=false")


def test_versions_travel_as_deltas_in_the_files_of_two_senders(train: Train) -> None:
    trainer = train(
        *_NO_VALIDATION,
        "schedule.total_steps=3",
        "sync.transport=file",
        "sync.delta.enabled=true",
        "rollout.dtype=bfloat16",
        "policy.parallel.pipeline=2",
        "policy.optimizer.lr=1e-6",
    )
    first, *others = trainer.metrics()
    assert first["sync/delta_ratio"] == 1
    for line in others:
        assert line["sync/delta_ratio"] == line["sync/bytes"] / line["weights/bytes"] < 0.1
        assert line["rollout/logprob_diff_max"] < 0.2  # of rounding
    assert not list((trainer.run_dir / "weights").iterdir())


def test_number_and_place_of_processes_do_not_change_what_is_learned(
    train: Train,
) -> None:
    alone = train(*_NO_VALIDATION, name="alone")
    saved = str(alone.run_dir / "config.json")
    data = train("--config", saved, "policy.parallel.data=2", name="data", base=())
    tensor = train(*_NO_VALIDATION, "policy.parallel.tensor=2", "launch=ray", name="ray")
    for other in (data, tensor):
        for one, two in zip(alone.metrics(), other.metrics(), strict=True):
            assert one["reward/mean"] == two["reward/mean"]
            assert one["tokens/sampled"] == two["tokens/sampled"]
            assert one["actor/loss"] == pytest.approx(two["actor/loss"], abs=1e-5)
            assert one["actor/grad_norm"] == pytest.approx(two["actor/grad_norm"], rel=1e-3)
