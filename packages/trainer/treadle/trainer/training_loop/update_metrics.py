"""Update metrics: what the optimizer steps of one batch reported, as one line of metrics."""

from treadle.trainer.policy.commands import UpdateStats

__all__ = ["update_metrics"]


def update_metrics(stats: UpdateStats) -> dict[str, float]:
    """Returns means over the optimizer steps that have the number, and sums of counts.

    The difference between engine and trainer, `rollout/*`, is taken before the batch has moved the
    policy: later optimizer steps also show what the batch itself has changed.
    """
    steps = stats.steps
    before = steps[0].metrics if stats.mismatch is None else stats.mismatch
    metrics = {name: value for name, value in before.items() if _is_mismatch(name)}
    for name in sorted({name for step in steps for name in step.metrics}):
        if not _is_mismatch(name):
            values = [step.metrics[name] for step in steps if name in step.metrics]
            metrics[name] = sum(values) / len(values)
    return metrics | {
        "actor/loss": sum(step.loss for step in steps) / len(steps),
        "actor/grad_norm": sum(step.grad_norm for step in steps) / len(steps),
        "actor/lr": steps[-1].learning_rate,
        "actor/updates": float(len(steps)),
        "actor/skipped_updates": float(sum(step.skipped for step in steps)),
        "actor/micro_batches": float(sum(step.num_micro_batches for step in steps)),
        "tokens/trained": float(sum(step.num_tokens for step in steps)),
        "tokens/loss": float(sum(step.num_loss_tokens for step in steps)),
        "actor/logprobs_s": stats.logprobs_s,
    }


def _is_mismatch(name: str) -> bool:
    return name.startswith("rollout/")
