"""Advantages and losses against checked-in numbers.

The inputs are in `algorithms.json` beside the outputs; nothing is drawn at run time. To accept a
change of the formulas, write the file anew and review the difference::

    python tests/golden/algorithms_test.py
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.trainer.algorithms.advantages import Outcomes, grpo
from treadle.trainer.algorithms.choose_loss import policy_loss
from treadle.trainer.config.algorithm import AlgorithmConfig
from treadle.trainer.policy.backend import LossInputs
from treadle.trainer.policy.batch import token_weights
from treadle.trainer.policy.types import TrainSequence

GOLDEN = Path(__file__).parent / "algorithms.json"
CASES: dict[str, Any] = json.loads(GOLDEN.read_text())


def outputs(case: dict[str, Any]) -> dict[str, Any]:
    """Advantage, token weight, loss and gradient of every token, in double precision."""
    config = AlgorithmConfig(**case["algorithm"])
    outcomes = Outcomes.of(case["rewards"], case["groups"])
    advantages = grpo(outcomes, norm_by_std=config.norm_by_std).tolist()
    batch = [
        TrainSequence(
            ids=(0,) * (1 + len(logprobs)),
            loss_mask=(False, *(True for _ in logprobs)),
            advantages=advantage,
        )
        for logprobs, advantage in zip(case["logprobs"], advantages, strict=True)
    ]
    weights = token_weights(batch, config.loss_aggregation, config.aggregation_length)
    counts = [sequence.num_loss_tokens for sequence in batch]
    per_token = [[w] * n for w, n in zip(weights, counts, strict=True)]
    logprobs_T = flat(case["logprobs"]).requires_grad_()
    entropy_T = flat(case["entropies"]).requires_grad_()
    output = policy_loss(config)(
        LossInputs(
            logprobs_T=logprobs_T,
            entropy_T=entropy_T,
            advantages_T=flat([[a] * n for a, n in zip(advantages, counts, strict=True)]),
            old_logprobs_T=flat(case["old_logprobs"]),
            rollout_logprobs_T=None,
            ref_logprobs_T=flat(case["ref_logprobs"]),
            stale_T=torch.zeros(sum(counts), dtype=torch.bool),
            sample_lengths_S=torch.tensor(counts),
        )
    )
    loss = (output.loss_T * flat(per_token)).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs_T.grad is not None
    return {
        "advantages": advantages,
        "loss": loss.item(),
        "loss_of_tokens": output.loss_T.tolist(),
        "gradient": logprobs_T.grad.tolist(),
        "metrics": {name: values.mean().item() for name, values in output.metrics_T.items()},
    }


def flat(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_checked_in(name: str) -> None:
    got, want = outputs(CASES[name]["inputs"]), CASES[name]["outputs"]
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert got[key] == pytest.approx(value, abs=1e-6), key


if __name__ == "__main__":
    for case in CASES.values():
        case["outputs"] = outputs(case["inputs"])
    GOLDEN.write_text(json.dumps(CASES, indent=1) + "\n")
