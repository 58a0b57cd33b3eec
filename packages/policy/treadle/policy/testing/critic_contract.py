"""The part of the policy contract about the critic: against transformers, and in every layout."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from treadle.agent_loop import FloatArray
from treadle.policy.backend import CriticBackend, PolicyBackend, Rendezvous
from treadle.policy.backends import registry
from treadle.policy.client.types import StepStats, TrainSequence
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.choices import BackendName
from treadle.policy.config.critic import CriticConfig, CriticOptimizerConfig
from treadle.policy.config.policy import OptimizerConfig, ParallelConfig, PolicyConfig
from treadle.policy.rank.train_batch import run_critic_update
from treadle.policy.testing.contract_base import ContractBase, OpenPolicy
from treadle.policy.testing.ranks import RankTask, run_ranks
from treadle.policy.testing.tiny import sequences

# With eps = 1 parameters compare as gradients do: see LINEAR in testing/contract_base.py.
LINEAR = CriticOptimizerConfig(lr=0.05, eps=1.0, grad_clip=2.0)
CRITIC = CriticConfig(optimizer=LINEAR, clip_value=0.2)
LENGTHS = (18, 41, 9, 64, 33)


def open_both(
    backend: BackendName, folder: Path, place: Rendezvous | None = None, **settings: Any
) -> tuple[PolicyBackend, CriticBackend]:
    """Returns a policy and its critic."""
    config = PolicyConfig(
        backend=backend,
        optimizer=OptimizerConfig(lr=0.05, eps=1.0),
        micro_batch_tokens=80,
        **settings,
    )
    policy = registry.build(
        config, folder, place or Rendezvous(), keep_reference=False, reference_path=None
    )
    return policy, policy.make_critic(CRITIC)


def with_targets(
    batch: Sequence[TrainSequence], values: Sequence[Sequence[float]], seed: int = 3
) -> list[TrainSequence]:
    """Returns sequences with these values, and random returns."""
    draw = random.Random(seed)
    return [
        replace(
            s,
            values=FloatArray(v),
            returns=FloatArray(draw.gauss(0.5, 1.0) for _ in s.ids),
        )
        for s, v in zip(batch, values, strict=True)
    ]


def learn(critic: CriticBackend, steps: int) -> list[StepStats]:
    """Trains a critic on a new batch in each step."""
    results = []
    for _ in range(steps):
        batch = sequences(LENGTHS, seed=critic.step)
        results.append(critic.train_step(with_targets(batch, critic.values(batch))))
    return results


def taught(
    backend: BackendName,
    folder: Path,
    parallel: Mapping[str, Any],
    place: Rendezvous | None = None,
    *,
    save: Path | None = None,
    load: Path | None = None,
) -> dict[str, Any]:
    """Two steps of the critic beside a policy; their figures, and the values after them.

    Between them it may be saved; if it is loaded, there is only the second.
    """
    policy, critic = open_both(backend, folder, place, parallel=ParallelConfig(**parallel))
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
    """Teaches in this rank's layout of each group."""
    results = []
    backend, groups, folder, saved = task.argument
    for number, layouts in enumerate(groups):
        if task.rank // 2 == len(layouts):
            break
        place = Rendezvous(
            rank=task.rank % 2,
            world_size=2,
            shared_file=task.folder / f"{number}-{task.rank // 2}",
        )
        layout = layouts[task.rank // 2]
        results.append(taught(backend, folder, layout, place, save=saved / name_of(layout)))
    return results


def name_of(layout: Mapping[str, Any]) -> str:
    """Returns the name of its checkpoint."""
    return "-".join(f"{key}-{value}" for key, value in layout.items())


class CriticContract(ContractBase):
    """See the module.

    Attributes:
        critic_layouts: Sizes of `policy.parallel` of two ranks; those of a group run side by side.
    """

    critic_layouts: ClassVar[Sequence[Sequence[Mapping[str, Any]]]] = ()

    def value_head(self, critic: Any) -> torch.Tensor:
        """Returns the weights of a critic's head, of one process."""
        raise NotImplementedError

    def test_values_and_their_loss_are_those_of_the_formula(
        self, folder: Path, open_policy: OpenPolicy
    ) -> None:
        """Against transformers' last hidden state, a linear head on it, and verl's value loss."""
        import transformers

        self.needs("critic")
        critic = open_policy(folder, micro_batch_tokens=80).make_critic(CRITIC)
        batch = sequences(LENGTHS)
        assert all(value == 0.0 for values in critic.values(batch) for value in values)
        head = torch.randn(64, generator=torch.Generator().manual_seed(5)) * 0.2
        with torch.no_grad():
            self.value_head(critic).copy_(head)

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

    def test_a_critic_that_is_not_finite_afterwards_is_told(
        self, folder: Path, open_policy: OpenPolicy
    ) -> None:
        """Finite weights may be so large that values are not, and every later step is skipped."""
        self.needs("critic")
        critic = open_policy(folder, micro_batch_tokens=80).make_critic(CRITIC)
        batch = sequences(LENGTHS[:2])
        trained = with_targets(batch, critic.values(batch))

        def broken() -> str:
            return run_critic_update(critic, trained, AlgorithmConfig(), epochs=1).broken

        assert not broken()
        head = self.value_head(critic)
        for size, told in (
            (3e38, "values are not finite"),
            (math.nan, "weights that are not finite"),
        ):
            with torch.no_grad():
                head.fill_(size)
            assert broken().endswith(told)

    def test_layouts_do_not_change_the_critic_and_read_each_others_checkpoints(
        self, folder: Path, tmp_path: Path
    ) -> None:
        groups = self.critic_layouts
        if not groups:
            pytest.skip(f"policy.backend={self.backend} has no critic over several ranks")
        most = 2 * max(map(len, groups))
        ranks = run_ranks(f"{__name__}:run", most, (self.backend, groups, folder, tmp_path))
        alone = taught(self.backend, folder, {})
        assert any(value for values in alone["values"] for value in values)
        for rank, results in enumerate(ranks):
            for layouts, got in zip(groups, results, strict=False):
                name = str(layouts[rank // 2])
                assert got["policy"], name
                for mine, want in zip(got["steps"], alone["steps"], strict=True):
                    assert mine[:2] == pytest.approx(want[:2], rel=1e-5), name
                    assert mine[2] == pytest.approx(want[2], abs=1e-5), name
                for values, wanted in zip(got["values"], alone["values"], strict=True):
                    assert values == pytest.approx(wanted, abs=1e-5), name
        for layout in (layout for layouts in groups for layout in layouts):
            (step,) = taught(self.backend, folder, {}, load=tmp_path / name_of(layout))["steps"]
            assert step[:2] == pytest.approx(alone["steps"][1][:2], rel=1e-5), layout
