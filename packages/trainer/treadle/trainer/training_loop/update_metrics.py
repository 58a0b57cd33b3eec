"""Metrics of the optimizer steps of one batch, and the message where they broke the policy."""

from collections.abc import Sequence
from pathlib import Path

from treadle.policy.v1 import training_service_pb2 as pb
from treadle.trainer.report.metrics import MFU, RANK_RATE

__all__ = ["broken_policy", "critic_metrics", "update_metrics"]


def update_metrics(stats: pb.UpdateResponse) -> dict[str, float]:
    """Returns means over the optimizer steps that have the number, sums of counts, most of memory.

    The difference between engine and trainer, `rollout/*`, is taken before the batch has moved the
    policy: later optimizer steps also show what the batch itself has changed.
    """
    steps = stats.steps
    before = stats.mismatch or steps[0].metrics
    metrics = {name: value for name, value in sorted(before.items()) if _is_mismatch(name)}
    for name in sorted({name for step in steps for name in step.metrics}):
        if not _is_mismatch(name):
            having = [step for step in steps if name in step.metrics]
            metrics[name] = _over_steps(name, having)
    return metrics | {
        "actor/loss": sum(step.loss for step in steps) / len(steps),
        "actor/grad_norm": sum(step.grad_norm for step in steps) / len(steps),
        "actor/lr": steps[-1].learning_rate,
        "actor/updates": float(len(steps)),
        "actor/skipped_updates": float(sum(step.skipped for step in steps)),
        "actor/micro_batches": float(sum(step.num_micro_batches for step in steps)),
        "tokens/trained": float(sum(step.num_tokens for step in steps)),
        "tokens/computed": float(sum(step.num_rows for step in steps)),
        "tokens/loss": float(sum(step.num_loss_tokens for step in steps)),
        "actor/logprobs_s": stats.logprobs_s,
    }


def _over_steps(name: str, steps: Sequence[pb.StepStats]) -> float:
    """Returns the mean of steps; of memory the most, of rates the mean over their time."""
    values = [step.metrics[name] for step in steps]
    if name.startswith("policy/memory_"):
        return max(values)
    weights = [1.0] * len(steps)
    if name in (RANK_RATE, MFU):
        weights = [max(step.time_s, 1e-9) for step in steps]
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


def _is_mismatch(name: str) -> bool:
    return name.startswith("rollout/")


def critic_metrics(stats: pb.UpdateCriticResponse) -> dict[str, float]:
    """Returns means over the critic's optimizer steps, and sums of counts."""
    steps = stats.steps
    return {
        **{
            name: sum(step.metrics[name] for step in steps) / len(steps)
            for name in sorted(steps[0].metrics)
        },
        "critic/vf_loss": sum(step.loss for step in steps) / len(steps),
        "critic/grad_norm": sum(step.grad_norm for step in steps) / len(steps),
        "critic/lr": steps[-1].learning_rate,
        "critic/updates": float(len(steps)),
        "critic/skipped_updates": float(sum(step.skipped for step in steps)),
    }


def broken_policy(
    step: int,
    stats: pb.UpdateResponse | pb.UpdateCriticResponse | pb.FineTuneResponse,
    kept: Path | None,
    *,
    lower: str = "policy.optimizer.lr",
) -> str:
    """Says which update broke the policy; later ones have no finite gradient."""
    applied = [update for update in stats.steps if not update.skipped]
    last = applied[-1] if applied else stats.steps[-1]
    advice = (
        "no checkpoint was saved before: start again in another run.dir"
        if kept is None
        else f"the last good checkpoint is {kept}: start again with the same run.dir"
    )
    return (
        f"step {step}: the update left {stats.broken} (gradient norm "
        f"{last.grad_norm:.4g}, learning rate {last.learning_rate:.4g}); they are neither "
        f"published nor saved. {advice[0].upper()}{advice[1:]} and a lower {lower}"
    )
