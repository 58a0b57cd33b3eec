from treadle.policy.v1 import training_service_pb2 as pb
from treadle.trainer.training_loop.update_metrics import update_metrics


def _step(loss: float, **metrics: float) -> pb.StepStats:
    return pb.StepStats(
        step=1,
        loss=loss,
        grad_norm=1.0,
        skipped=False,
        learning_rate=0.1,
        num_sequences=2,
        num_computed=2,
        num_tokens=10,
        num_rows=6,
        num_loss_tokens=4,
        num_micro_batches=1,
        time_s=0.0,
        metrics={name.replace("__", "/"): value for name, value in metrics.items()},
    )


def test_updates_are_averaged_over_those_that_have_the_number() -> None:
    steps = (
        _step(1.0),  # no sequence of it had an advantage, so nothing was computed
        _step(2.0, actor__entropy=0.5, rollout__kl=0.1),
        _step(3.0, actor__entropy=1.5, rollout__kl=0.9),
    )
    metrics = update_metrics(pb.UpdateResponse(steps=steps))
    assert metrics["actor/loss"] == 2.0
    assert metrics["actor/entropy"] == 1.0
    assert (metrics["tokens/trained"], metrics["tokens/computed"]) == (30, 18)


def test_the_mismatch_is_that_before_the_batch_moved_the_policy() -> None:
    first, second = _step(1.0, rollout__kl=0.1), _step(2.0, rollout__kl=0.9)
    alone = pb.UpdateResponse(steps=(first, second))
    assert update_metrics(alone)["rollout/kl"] == 0.1
    later = pb.UpdateResponse(steps=(_step(1.0), second))
    assert "rollout/kl" not in update_metrics(later)
    whole = pb.UpdateResponse(steps=(first, second), mismatch={"rollout/kl": 0.2})
    assert update_metrics(whole)["rollout/kl"] == 0.2


def test_a_rate_is_that_of_all_time_and_memory_the_most() -> None:
    quick = _step(1.0, policy__tokens_per_second=900.0, policy__memory_peak_bytes=5.0)
    slow = _step(1.0, policy__tokens_per_second=100.0, policy__memory_peak_bytes=3.0)
    quick.time_s, slow.time_s = 1.0, 3.0
    metrics = update_metrics(pb.UpdateResponse(steps=(quick, slow)))
    assert metrics["policy/tokens_per_second"] == 300.0
    assert metrics["policy/memory_peak_bytes"] == 5.0
