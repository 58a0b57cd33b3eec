"""The critic against transformers, in every layout, over a resume, and beside a policy."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.agent_loop import FloatArray
from treadle.policy.client.types import StepStats, TrainSequence
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.critic import CriticConfig, CriticOptimizerConfig
from treadle.policy.config.policy import OptimizerConfig, ParallelConfig, PolicyConfig
from treadle.policy.rank.train_batch import run_critic_update
from treadle.policy.testing.ranks import RankTask, run_ranks
from treadle.policy.testing.tiny import sequences, write_model

# With eps = 1 parameters compare as gradients do: see LINEAR in testing/contract_base.py.
LINEAR = CriticOptimizerConfig(lr=0.05, eps=1.0, grad_clip=2.0)
CRITIC = CriticConfig(optimizer=LINEAR, clip_value=0.2)
LENGTHS = (18, 41, 9, 64, 33)


def open_both(
    folder: Path, critic: CriticConfig = CRITIC, rendezvous: Any = None, **settings: Any
) -> tuple[Any, Any]:
    from treadle.policy.backends.megatron.backend import MegatronPolicy

    config = PolicyConfig(
        optimizer=OptimizerConfig(lr=0.05, eps=1.0), micro_batch_tokens=80, **settings
    )
    policy = MegatronPolicy(config, folder, rendezvous)
    return policy, policy.make_critic(critic)


def with_targets(
    batch: Sequence[TrainSequence], values: Sequence[tuple[float, ...]], seed: int = 3
) -> list[TrainSequence]:
    draw = random.Random(seed)
    return [
        replace(
            s,
            values=FloatArray(v),
            returns=FloatArray(draw.gauss(0.5, 1.0) for _ in s.ids),
        )
        for s, v in zip(batch, values, strict=True)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "qwen2"
    write_model(path)
    return path


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    policies: list[Any] = []
    yield policies
    for policy in policies:
        policy.close()


def test_values_and_their_loss_are_those_of_the_formula(folder: Path, opened: list[Any]) -> None:
    """Against transformers' last hidden state, a linear head on it, and verl's value loss."""
    import transformers

    policy, critic = open_both(folder)
    opened.append(policy)
    batch = sequences(LENGTHS)
    assert all(value == 0.0 for values in critic.values(batch) for value in values)
    head = torch.randn(64, generator=torch.Generator().manual_seed(5)) * 0.2
    with torch.no_grad():
        critic._model.value_weight.copy_(head)

    body = transformers.AutoModel.from_pretrained(folder)
    body.train(False)
    values = critic.values(batch)
    total, count, clipped = 0.0, 0, 0
    with torch.no_grad():
        old = [tuple(v + 0.3 * (-1) ** t for t, v in enumerate(each)) for each in values]
        trained = with_targets(batch, old)
        for sequence, got in zip(trained, values, strict=True):
            hidden = body(torch.tensor([sequence.ids])).last_hidden_state[0]
            assert sequence.values is not None and sequence.returns is not None
            for t, masked in enumerate(sequence.loss_mask):
                if not masked:
                    assert got[t] == 0.0
                    continue
                value = float(hidden[t - 1] @ head)  # the state before the token
                assert got[t] == pytest.approx(value, abs=1e-4)
                was, target = sequence.values[t], sequence.returns[t]
                near = min(max(value, was - 0.2), was + 0.2)
                total += 0.5 * max((value - target) ** 2, (near - target) ** 2)
                clipped += (near - target) ** 2 > (value - target) ** 2
                count += 1
    stats = critic.train_step(trained)
    assert stats.loss == pytest.approx(total / count, rel=1e-4)
    assert stats.metrics["critic/vf_clipfrac"] == pytest.approx(clipped / count, abs=0.02)
    assert 0 < clipped < count


def test_a_critic_that_is_not_finite_afterwards_is_told(folder: Path, opened: list[Any]) -> None:
    """Finite weights may be so large that values are not, and every later step is skipped."""
    policy, critic = open_both(folder)
    opened.append(policy)
    batch = sequences(LENGTHS[:2])
    trained = with_targets(batch, critic.values(batch))

    def broken() -> str:
        return run_critic_update(critic, trained, AlgorithmConfig(), epochs=1).broken

    assert not broken()
    head = critic._model.value_weight
    for size, told in ((3e38, "values are not finite"), (math.nan, "weights that are not finite")):
        with torch.no_grad():
            head.fill_(size)
        assert broken().endswith(told)


def learn(critic: Any, steps: int) -> list[StepStats]:
    results = []
    for _ in range(steps):
        batch = sequences(LENGTHS, seed=critic.step)
        results.append(critic.train_step(with_targets(batch, critic.values(batch))))
    return results


LAYOUTS: list[list[dict[str, Any]]] = [
    [{"tensor": 2}, {"pipeline": 2}],
    [{"data": 2}, {"tensor": 2, "sequence": True}],
    [{"context": 2}],
]


def taught(
    folder: Path,
    parallel: dict[str, Any],
    rendezvous: Any = None,
    *,
    save: Path | None = None,
    load: Path | None = None,
) -> dict[str, Any]:
    """Two steps of the critic beside a policy; their figures, and the values after them.

    Between them it may be saved; if it is loaded, there is only the second.
    """
    policy, critic = open_both(folder, rendezvous=rendezvous, parallel=ParallelConfig(**parallel))
    batch = sequences(LENGTHS)
    before = policy.logprobs(batch)
    if load is not None:
        critic.load(load)
    first = learn(critic, 1 - critic.step)
    if save is not None:
        critic.save(save)
    result = {
        "steps": [(s.loss, s.grad_norm, s.metrics) for s in (*first, *learn(critic, 1))],
        "values": critic.values(batch),
        "policy": before == policy.logprobs(batch),
    }
    policy.close()
    return result


def run(task: RankTask) -> list[dict[str, Any]]:
    from treadle.policy.backend import Rendezvous

    results = []
    for number, layouts in enumerate(LAYOUTS):
        if task.rank // 2 == len(layouts):
            break
        place = Rendezvous(
            rank=task.rank % 2,
            world_size=2,
            shared_file=task.folder / f"{number}-{task.rank // 2}",
        )
        folder, saved = task.argument
        layout = layouts[task.rank // 2]
        results.append(taught(folder, layout, place, save=saved / name_of(layout)))
    return results


def name_of(layout: dict[str, Any]) -> str:
    return "-".join(f"{key}-{value}" for key, value in layout.items())


def test_layouts_do_not_change_the_critic_and_read_each_others_checkpoints(
    folder: Path, tmp_path: Path
) -> None:
    ranks = run_ranks(f"{__name__}:run", 4, (folder, tmp_path))
    alone = taught(folder, {})
    assert any(value for values in alone["values"] for value in values)
    for rank, results in enumerate(ranks):
        for layouts, got in zip(LAYOUTS, results, strict=False):
            name = str(layouts[rank // 2])
            assert got["policy"], name
            for mine, want in zip(got["steps"], alone["steps"], strict=True):
                assert mine[:2] == pytest.approx(want[:2], rel=1e-5), name
                assert mine[2] == pytest.approx(want[2], abs=1e-5), name
            for values, wanted in zip(got["values"], alone["values"], strict=True):
                assert values == pytest.approx(wanted, abs=1e-5), name
    for layout in (layout for layouts in LAYOUTS for layout in layouts):
        (step,) = taught(folder, {}, load=tmp_path / name_of(layout))["steps"]
        assert step[:2] == pytest.approx(alone["steps"][1][:2], rel=1e-5), layout
