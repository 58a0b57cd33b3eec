"""The part of the policy contract about steps: their losses, weights, statistics and gradients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from treadle.agent_loop import BoolArray, FloatArray
from treadle.policy.algorithms.choose_loss import BUILT_IN, policy_loss
from treadle.policy.algorithms.losses import ClippedSurrogate, NegativeLogLikelihood
from treadle.policy.backend import LossFn, LossInputs, LossOutput, step_stats
from treadle.policy.client.types import StepStats, TrainSequence
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.policy import OptimizerConfig
from treadle.policy.rank.train_batch import run_update
from treadle.policy.testing.contract_base import (
    LINEAR,
    ContractBase,
    OpenPolicy,
    Weights,
    exported,
    largest_difference,
)
from treadle.policy.testing.tiny import VOCAB, sequences
from treadle.policy.v1 import training_service_pb2 as pb

_LAST = (False, False, False, False, True)


@dataclass(frozen=True)
class ComputeAll(ClippedSurrogate):
    """The same loss, but without leave to skip."""

    @property
    def zero_without_advantage(self) -> bool:
        return False


@dataclass(frozen=True)
class Broken:
    """A loss whose gradient overflows."""

    zero_without_advantage: bool = False

    def __call__(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(loss_T=inputs.logprobs_T * float("inf"))


@dataclass(frozen=True)
class OwnLoss:
    """A loss of a user: of log-probabilities and entropies, with a metric."""

    zero_without_advantage: bool = False

    def __call__(self, inputs: LossInputs) -> LossOutput:
        loss_T = -inputs.advantages_T * inputs.logprobs_T - 0.1 * inputs.entropy_T
        return LossOutput(loss_T=loss_T, metrics_T={"own/loss": loss_T.detach()})


class StepContract(ContractBase):
    """See the module.

    Attributes:
        learned: Share of the loss that is left after some steps, at most.
        distance: The least KL of a student from its teacher.
        distillation_lr: Learning rate with which it falls to that share in 20 steps.
    """

    learned: ClassVar[float] = 0.5
    distance: ClassVar[float] = 0.2
    distillation_lr: ClassVar[float] = 1e-3

    @pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
    def test_micro_batches_and_packing_order_do_not_change_the_step(
        self, folder: Path, open_policy: OpenPolicy, aggregation: Any
    ) -> None:
        batch = [replace(s, trajectory=None if i % 2 else 0) for i, s in enumerate(sequences())]
        loss = policy_loss(AlgorithmConfig(entropy_coef=0.01))

        def run(batch: Sequence[TrainSequence], **settings: Any) -> tuple[StepStats, Weights]:
            policy = open_policy(folder, optimizer=LINEAR, **settings)
            return policy.train_step(batch, loss, aggregation=aggregation), exported(policy)

        want, weights = run(batch)
        assert want.num_micro_batches == 1
        variants: list[tuple[list[TrainSequence], dict[str, Any]]] = [
            (batch, {"micro_batch_tokens": 70}),
            (batch[::-1], {"micro_batch_tokens": 2}),
        ]
        if self.capabilities.recompute:
            variants.append((batch, {"recompute": "full", "logits_chunk_tokens": 7}))
        for other, settings in variants:
            stats, got = run(other, **settings)
            assert stats.loss == pytest.approx(want.loss, abs=1e-6)
            assert stats.metrics == pytest.approx(want.metrics, abs=1e-5)
            assert largest_difference(got, weights) < 1e-6
            assert settings.get("micro_batch_tokens") != 2 or stats.num_micro_batches == len(batch)

    def test_a_mask_leaves_the_distribution_over_the_ids_that_it_keeps(
        self, folder: Path, open_policy: OpenPolicy
    ) -> None:
        """Against sequences that end with each of these ids, whose probabilities are of all."""
        kept, prompt = (3, 7, 140, 400), (5, 6, 7, 8)
        ends = [TrainSequence(ids=(*prompt, i), loss_mask=_LAST, advantages=1.0) for i in kept]
        bits = bytearray(1 + 400 // 8)
        for each in kept[1:]:
            bits[each // 8] |= 1 << each % 8
        listed = b"\x08\x85\x01\x84\x02"  # Differences 8, 133 and 260.
        masks = (listed, b"\x00" + bytes(bits))
        policy = open_policy(folder, optimizer=LINEAR, keep_reference=True)
        whole = policy.logprobs(ends, temperature=0.7)
        of_kept = np.array([logprobs[-1] for logprobs in whole], np.float64)
        shares = np.exp(of_kept) / np.exp(of_kept).sum()
        for mask in masks:
            masked = replace(ends[0], sampling_masks=(b"",) * len(prompt) + (mask,))
            for found in (
                policy.logprobs([masked, *ends], temperature=0.7),
                policy.reference_logprobs([masked, *ends], temperature=0.7),
            ):
                assert found[0][-1] == pytest.approx(math.log(shares[0]), abs=2e-6)
                assert [logprobs[-1] for logprobs in found[1:]] == pytest.approx(of_kept, abs=1e-6)
        alone = replace(ends[0], sampling_masks=(b"",) * len(masked.ids))
        assert policy.logprobs([alone])[0][-1] == pytest.approx(0.0, abs=1e-6)
        beyond = replace(alone, sampling_masks=(b"",) * len(prompt) + (b"\xff\x7f",))
        with pytest.raises(ValueError, match=r"keeps id 16382, and the vocabulary has \d+"):
            policy.logprobs([beyond])

        loss = policy_loss(AlgorithmConfig())
        policy.train_step([masked], loss, aggregation="token-sum", temperature=0.7)
        got = exported(policy)
        dense = [
            replace(end, advantages=float((end is ends[0]) - share))
            for end, share in zip(ends, shares, strict=True)
        ]
        policy = open_policy(folder, optimizer=LINEAR)
        policy.train_step(dense, loss, aggregation="token-sum", temperature=0.7)
        assert largest_difference(got, exported(policy)) < 1e-6

    def test_gradients_add_up_until_the_optimizer_steps(
        self, folder: Path, open_policy: OpenPolicy
    ) -> None:
        """Parts of a batch equal the batch, where weights are not normalised; with an own loss."""
        batch, loss = sequences(), OwnLoss()
        policy = open_policy(folder, optimizer=LINEAR)
        want = policy.train_step(batch, loss, aggregation="token-sum")
        weights = exported(policy)
        assert want.metrics["own/loss"] == pytest.approx(want.loss / want.num_loss_tokens, rel=1e-5)
        policy = open_policy(folder, optimizer=LINEAR)
        with pytest.raises(RuntimeError, match="call add_gradient before optimizer_step"):
            policy.optimizer_step()
        before = policy.logprobs(batch)
        parts = [
            policy.add_gradient(part, loss, aggregation="token-sum")()
            for part in (batch[:3], batch[3:4], batch[4:])
        ]
        policy.release_memory()
        assert policy.logprobs(batch) == before  # reading between them changes nothing
        stats = policy.optimizer_step()
        assert sum(part.loss for part in parts) == pytest.approx(want.loss, rel=1e-6)
        assert step_stats(parts[0], stats, time_s=0.0).num_sequences == 3
        assert stats.grad_norm == pytest.approx(want.grad_norm, rel=1e-5)
        assert (stats.step, stats.learning_rate) == (want.step, want.learning_rate)
        assert largest_difference(exported(policy), weights) < 1e-6
        with pytest.raises(RuntimeError, match="call add_gradient before optimizer_step"):
            policy.optimizer_step()

    def test_a_step_may_have_settings_of_its_own(
        self, folder: Path, open_policy: OpenPolicy
    ) -> None:
        """They equal those of the configuration, and are forgotten after the step."""
        batch, loss = sequences(), OwnLoss()
        other = OptimizerConfig(
            lr=3e-2, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.3, grad_clip=0.05
        )
        policy = open_policy(folder, optimizer=other)
        policy.train_step(batch, loss)
        weights = exported(policy)
        policy = open_policy(folder, optimizer=LINEAR)
        policy.add_gradient(batch, loss)
        assert policy.optimizer_step(other.at_step(0)).learning_rate == other.lr
        assert largest_difference(exported(policy), weights) < 1e-6
        assert policy.train_step(batch, loss).learning_rate == LINEAR.learning_rate(1)

    @pytest.mark.parametrize("name", [*BUILT_IN, "corrected"])
    def test_a_run_is_repeated_bit_for_bit_and_micro_batches_do_not_change_it(
        self, folder: Path, open_policy: OpenPolicy, name: str
    ) -> None:
        """Every loss, over several updates of a batch."""
        settings: dict[str, Any] = {
            "loss": name,
            "epochs": 2,
            "mini_batches": 2,
            "cov": {"ratio": 0.1, "clip_low": -1.0},
        }
        if name == "corrected":
            correction = {"weights": "token", "reject": {"token_k1": [0.5, 2.0]}, "veto": 1e-4}
            settings |= {"loss": "ppo", "correction": correction}
            settings |= {"kl_coef": 0.1, "entropy_coef": 0.01}
        if name == "kl_cov":
            # Where a ratio is 1 but for rounding, the gradient of its |log ratio| has its sign.
            settings["old_logprobs"] = "rollout"
        algorithm = AlgorithmConfig.model_validate(settings)
        batch = [replace(s, trajectory=0 if i < 2 else None) for i, s in enumerate(sequences())]

        def update(micro_batch_tokens: int) -> tuple[pb.UpdateResponse, Weights]:
            policy = open_policy(
                folder,
                keep_reference=algorithm.needs_reference,
                optimizer=LINEAR,
                micro_batch_tokens=micro_batch_tokens,
            )
            return run_update(policy, batch, algorithm, temperature=1.0), exported(policy)

        first, again, cut = update(300), update(300), update(60)
        assert [step.loss for step in first[0].steps] == [step.loss for step in again[0].steps]
        assert largest_difference(first[1], again[1]) == 0.0
        assert first[0].steps[0].num_micro_batches < cut[0].steps[0].num_micro_batches
        for step, other in zip(first[0].steps, cut[0].steps, strict=True):
            assert other.loss == pytest.approx(step.loss, abs=1e-5)
            # Of rounding alone where nothing is to learn yet: a distillation begins at its teacher.
            assert other.grad_norm == pytest.approx(step.grad_norm, rel=1e-4, abs=1e-6)
        assert largest_difference(first[1], cut[1]) < 1e-5

    def test_sequences_without_advantage_are_skipped_and_counted(
        self, folder: Path, open_policy: OpenPolicy
    ) -> None:
        batch = [
            replace(s, advantages=FloatArray((0.0,) * len(s.ids))) if i % 2 else s
            for i, s in enumerate(sequences())
        ]

        def step(loss: LossFn) -> tuple[StepStats, Weights]:
            policy = open_policy(folder, optimizer=LINEAR)
            return policy.train_step(batch, loss), exported(policy)

        skipping, weights = step(ClippedSurrogate())
        computing, all_weights = step(ComputeAll())
        assert (skipping.num_computed, computing.num_computed) == (4, 8)
        assert skipping.num_loss_tokens == computing.num_loss_tokens
        assert skipping.num_tokens < computing.num_tokens
        assert skipping.loss == pytest.approx(computing.loss, abs=1e-7)
        assert skipping.grad_norm == pytest.approx(computing.grad_norm, rel=1e-6)
        assert largest_difference(weights, all_weights) < 1e-7

    def test_a_step_keeps_what_it_computed_of_each_token(
        self, folder: Path, open_policy: OpenPolicy
    ) -> None:
        policy = open_policy(folder, optimizer=LINEAR)
        first, *others = sequences()
        batch = [replace(first, advantages=0.0), *others]
        before = policy.logprobs(batch, temperature=0.9)
        loss = policy_loss(AlgorithmConfig())
        kept = policy.train_step(batch, loss, temperature=0.9, keep_tokens=True).tokens
        assert kept is not None
        expected = [
            math.nan if sequence is batch[0] else logprob
            for sequence, logprobs in zip(batch, before, strict=True)
            for logprob, masked in zip(logprobs, sequence.loss_mask, strict=True)
            if masked
        ]
        np.testing.assert_allclose(kept.logprobs_M, expected, atol=1e-5)
        assert (np.isnan(kept.entropy_M) == np.isnan(expected)).all()
        assert 0 < np.nanmean(kept.entropy_M) <= math.log(VOCAB)
        assert policy.train_step(batch, loss).tokens is None

    def test_a_batch_without_any_advantage_has_no_gradient_and_no_metrics(
        self, folder: Path, open_policy: OpenPolicy
    ) -> None:
        batch = [replace(s, advantages=FloatArray((0.0,) * len(s.ids))) for s in sequences()]
        stats = open_policy(folder, optimizer=LINEAR).train_step(batch, ClippedSurrogate())
        assert (stats.num_computed, stats.grad_norm, stats.loss) == (0, 0.0, 0.0)
        assert stats.metrics == {}

    def test_a_gradient_that_is_not_finite_changes_nothing(
        self, folder: Path, open_policy: OpenPolicy
    ) -> None:
        policy = open_policy(folder, optimizer=OptimizerConfig(lr=1e-2))
        batch = sequences()
        policy.train_step(batch, ClippedSurrogate())
        before = exported(policy)
        stats = policy.train_step(batch, Broken())
        assert stats.skipped
        assert not math.isfinite(stats.grad_norm)
        assert stats.step == 2
        assert largest_difference(exported(policy), before) == 0.0
        assert not policy.train_step(batch, ClippedSurrogate()).skipped

    def test_supervised_training_learns_a_sequence(
        self, folder: Path, open_policy: OpenPolicy
    ) -> None:
        optimizer = OptimizerConfig(lr=3e-3, warmup_steps=2, schedule="cosine", decay_steps=12)
        policy = open_policy(folder, optimizer=optimizer)
        ids = [i * 7 % VOCAB for i in range(24)]
        mask = tuple(i > 3 for i in range(24))
        batch = [TrainSequence(ids=tuple(ids), loss_mask=mask, advantages=(1.0,) * 24)]
        steps = [policy.train_step(batch, NegativeLogLikelihood()) for _ in range(12)]
        assert steps[-1].loss < self.learned * steps[0].loss
        assert steps[0].learning_rate == pytest.approx(1.5e-3)
        assert steps[0].metrics.keys() == {"actor/entropy"}

    def test_the_reference_stays_while_the_policy_moves(
        self, folder: Path, open_policy: OpenPolicy
    ) -> None:
        policy = open_policy(folder, keep_reference=True, optimizer=OptimizerConfig(lr=1e-2))
        batch = sequences()
        start = policy.logprobs(batch)
        loss = policy_loss(AlgorithmConfig(kl_coef=0.1))
        with_ref = [
            replace(s, ref_logprobs=r)
            for s, r in zip(batch, policy.reference_logprobs(batch), strict=True)
        ]
        first = policy.train_step(with_ref, loss)
        second = policy.train_step(with_ref, loss)
        assert first.metrics["actor/kl_loss"] == pytest.approx(0.0, abs=1e-9)
        assert second.metrics["actor/kl_loss"] > 1e-4
        assert policy.reference_logprobs(batch) == start
        assert policy.logprobs(batch) != start

    def test_a_student_learns_the_distribution_of_its_teacher(
        self, tmp_path: Path, open_policy: OpenPolicy
    ) -> None:
        """Only by what it samples itself; the reverse KL over the vocabulary is exact here."""
        self.needs("other_reference")
        ids, prompt = 16, (3, 5)
        self.write(tmp_path / "student", vocab_size=ids)
        self.write(tmp_path / "teacher", "llama", vocab_size=ids, hidden_size=32)
        policy = open_policy(
            tmp_path / "student",
            keep_reference=True,
            reference_path=tmp_path / "teacher",
            optimizer=OptimizerConfig(lr=self.distillation_lr),
        )
        every = [
            TrainSequence(ids=(*prompt, v), loss_mask=(False, False, True), advantages=0.0)
            for v in range(ids)
        ]
        scores = policy.reference_logprobs(every, temperature=0.3)
        teacher = np.array([each[-1] for each in scores])

        def student() -> np.ndarray[Any, Any]:
            return np.array([each[-1] for each in policy.logprobs(every, temperature=0.3)])

        def reverse_kl() -> float:
            logp = student()
            return float((np.exp(logp) * (logp - teacher)).sum())

        began, draw = reverse_kl(), np.random.default_rng(0)
        for _ in range(20):
            p = np.exp(student())
            sampled = [every[v] for v in draw.choice(ids, size=128, p=p / p.sum())]
            run_update(policy, sampled, AlgorithmConfig(loss="distillation"), temperature=0.3)
        assert began > self.distance
        assert reverse_kl() < self.learned * began

    def test_bfloat16_trains_and_exports_bfloat16(
        self, folder: Path, open_policy: OpenPolicy
    ) -> None:
        if "bfloat16" not in self.capabilities.dtypes:
            pytest.skip(f"policy.backend={self.backend} has no bfloat16")
        policy = open_policy(folder, dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-3))
        batch = sequences()
        stats = policy.train_step(batch, ClippedSurrogate())
        sums = [s.at_loss_tokens("advantages").sum() for s in batch]
        assert stats.loss == pytest.approx(-sum(sums) / stats.num_loss_tokens, abs=1e-6)
        assert not stats.skipped
        assert {str(t.tensor.dtype) for t in policy.export_weights()} == {"torch.bfloat16"}
        assert {spec.element_type for spec in policy.weight_specs()} == {"bfloat16"}

    def test_what_a_step_cannot_take_is_refused(
        self, folder: Path, open_policy: OpenPolicy
    ) -> None:
        policy = open_policy(folder)
        batch = sequences()
        batch[0] = replace(batch[0], old_logprobs=FloatArray((0.0,) * len(batch[0].ids)))
        with pytest.raises(ValueError, match="1 of 8 sequences have old_logprobs"):
            policy.train_step(batch, ClippedSurrogate())
        silent = [replace(s, loss_mask=BoolArray.of([False] * len(s.ids))) for s in batch[1:]]
        with pytest.raises(ValueError, match="none of the 7 sequences has a token"):
            policy.train_step(silent, ClippedSurrogate())
        with pytest.raises(RuntimeError, match="keep_reference"):
            policy.reference_logprobs(batch)
