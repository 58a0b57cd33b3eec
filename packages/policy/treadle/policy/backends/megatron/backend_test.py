import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from treadle.agent_loop import FloatArray
from treadle.policy.algorithms.choose_loss import policy_loss
from treadle.policy.algorithms.losses import ClippedSurrogate, NegativeLogLikelihood
from treadle.policy.backend import CheckpointError, LossFn, LossInputs, LossOutput, Rendezvous
from treadle.policy.backends.description import UnsupportedModelError
from treadle.policy.backends.megatron.architecture import Architecture
from treadle.policy.backends.megatron.backend import MegatronPolicy
from treadle.policy.backends.megatron.memory import estimate_memory
from treadle.policy.backends.megatron.testing.tiny import VOCAB, sequences, write_model
from treadle.policy.client.types import StepStats, TrainSequence
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.policy import OptimizerConfig, ParallelConfig, PolicyConfig
from treadle.policy.rank.train_batch import run_update

# See parallel_test: with eps = 1 parameters compare as gradients do.
LINEAR = OptimizerConfig(lr=0.05, eps=1.0, grad_clip=2.0)


@pytest.fixture
def opened() -> Iterator[list[MegatronPolicy]]:
    """Policies to be closed at the end; one at a time can be open in a process."""
    policies: list[MegatronPolicy] = []
    yield policies
    for policy in policies:
        policy.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "qwen2"
    write_model(path)
    return path


def step(
    folder: Path, batch: Sequence[TrainSequence], loss: LossFn, **settings: Any
) -> tuple[StepStats, dict[str, np.ndarray[Any, Any]]]:
    policy = MegatronPolicy(PolicyConfig(**({"optimizer": LINEAR} | settings)), folder)
    try:
        stats = policy.train_step(batch, loss)
        return stats, {t.name: t.tensor.clone().numpy() for t in policy.export_weights()}
    finally:
        policy.close()


def largest_difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    return max(float(abs(a[name] - b[name]).max()) for name in a)


@dataclass(frozen=True)
class KeptActivations(ClippedSurrogate):
    """The same loss, which notes the bytes that the forward pass has kept for the backward pass."""

    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    num_bytes: list[int] = field(default_factory=list)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            self.kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def __call__(self, inputs: LossInputs) -> LossOutput:
        self.num_bytes.append(sum(t.untyped_storage().nbytes() for t in self.kept.values()))
        return super().__call__(inputs)


def test_recomputing_changes_no_bit_and_keeps_less(folder: Path) -> None:
    def run(recompute: str, *modules: str) -> tuple[StepStats, dict[str, Any], int]:
        loss = KeptActivations()
        settings = {"recompute_modules": modules} if modules else {}
        with torch.autograd.graph.saved_tensors_hooks(loss.keep, lambda tensor: tensor):
            stats, weights = step(folder, sequences(), loss, recompute=recompute, **settings)
        return stats, weights, loss.num_bytes[-1]

    want, weights, everything = run("none")
    kept = [everything]
    for how in (["selective", "core_attn"], ["selective", "mlp"], ["full"]):
        got, recomputed, num_bytes = run(*how)
        assert (got.loss, got.grad_norm, got.metrics) == (want.loss, want.grad_norm, want.metrics)
        assert largest_difference(recomputed, weights) == 0.0
        kept.append(num_bytes)
    assert sorted(kept, reverse=True) == kept
    assert len(set(kept)) == len(kept), kept


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_micro_batching_packing_order_and_recomputing_do_not_change_the_step(
    folder: Path, aggregation: Any
) -> None:
    batch = [replace(s, trajectory=None if i % 2 else 0) for i, s in enumerate(sequences())]
    loss = policy_loss(AlgorithmConfig(entropy_coef=0.01))

    def run(batch: Sequence[TrainSequence], **settings: Any) -> tuple[StepStats, dict[str, Any]]:
        policy = MegatronPolicy(PolicyConfig(optimizer=LINEAR, **settings), folder)
        try:
            stats = policy.train_step(batch, loss, aggregation=aggregation)
            return stats, {t.name: t.tensor.clone().numpy() for t in policy.export_weights()}
        finally:
            policy.close()

    want, weights = run(batch)
    assert want.num_micro_batches == 1
    variants: list[tuple[list[TrainSequence], dict[str, Any]]] = [
        (batch, {"micro_batch_tokens": 70}),
        (batch[::-1], {"micro_batch_tokens": 2}),
        (batch, {"recompute": "full", "logits_chunk_tokens": 7}),
    ]
    for other, settings in variants:
        stats, got = run(other, **settings)
        assert stats.loss == pytest.approx(want.loss, abs=1e-6)
        assert stats.metrics == pytest.approx(want.metrics, abs=1e-5)
        assert largest_difference(got, weights) < 1e-6
        assert settings.get("micro_batch_tokens") != 2 or stats.num_micro_batches == len(batch)


@dataclass(frozen=True)
class ComputeAll(ClippedSurrogate):
    """The same loss, but without leave to skip."""

    @property
    def zero_without_advantage(self) -> bool:
        return False


def test_sequences_without_advantage_are_skipped_and_counted(folder: Path) -> None:
    batch = [
        replace(s, advantages=FloatArray((0.0,) * len(s.ids))) if i % 2 else s
        for i, s in enumerate(sequences())
    ]
    skipping, weights = step(folder, batch, ClippedSurrogate())
    computing, all_weights = step(folder, batch, ComputeAll())
    assert (skipping.num_computed, computing.num_computed) == (4, 8)
    assert skipping.num_loss_tokens == computing.num_loss_tokens
    assert skipping.num_tokens < computing.num_tokens
    assert skipping.loss == pytest.approx(computing.loss, abs=1e-7)
    assert skipping.grad_norm == pytest.approx(computing.grad_norm, rel=1e-6)
    assert largest_difference(weights, all_weights) < 1e-7


def test_a_step_keeps_what_it_computed_of_each_token(
    folder: Path, opened: list[MegatronPolicy]
) -> None:
    policy = MegatronPolicy(PolicyConfig(optimizer=LINEAR), folder)
    opened.append(policy)
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


def test_a_batch_without_any_advantage_has_no_gradient_and_no_metrics(folder: Path) -> None:
    batch = [replace(s, advantages=FloatArray((0.0,) * len(s.ids))) for s in sequences()]
    stats, _ = step(folder, batch, ClippedSurrogate())
    assert (stats.num_computed, stats.grad_norm, stats.loss) == (0, 0.0, 0.0)
    assert stats.metrics == {}


@dataclass(frozen=True)
class Broken:
    """A loss whose gradient overflows."""

    zero_without_advantage: bool = False

    def __call__(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(loss_T=inputs.logprobs_T * float("inf"))


def test_a_gradient_that_is_not_finite_changes_nothing(
    folder: Path, opened: list[MegatronPolicy]
) -> None:
    policy = MegatronPolicy(PolicyConfig(optimizer=OptimizerConfig(lr=1e-2)), folder)
    opened.append(policy)
    batch = sequences()
    policy.train_step(batch, ClippedSurrogate())
    before = {t.name: t.tensor.clone() for t in policy.export_weights()}
    stats = policy.train_step(batch, Broken())
    assert stats.skipped
    assert not math.isfinite(stats.grad_norm)
    assert stats.step == 2
    after = {t.name: t.tensor for t in policy.export_weights()}
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not policy.train_step(batch, ClippedSurrogate()).skipped


def test_weights_that_are_not_finite_are_noticed_and_never_loaded(
    folder: Path, tmp_path: Path, opened: list[MegatronPolicy]
) -> None:
    policy = MegatronPolicy(PolicyConfig(), folder)
    opened.append(policy)
    assert policy.weights_are_finite()
    norm = next(t.tensor for t in policy.export_weights() if t.name == "model.norm.weight")
    norm[3] = math.nan  # the live parameter: the model's own norm is not copied
    assert not policy.weights_are_finite()
    policy.save(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"the weights in .*saved are not finite"):
        policy.load(tmp_path / "saved")
    policy.save_hf(tmp_path / "hf")
    policy.close()
    opened.remove(policy)
    with pytest.raises(ValueError, match=r"hf: its weights are not finite"):
        MegatronPolicy(PolicyConfig(), tmp_path / "hf")


def test_supervised_training_learns_a_sequence(folder: Path, opened: list[MegatronPolicy]) -> None:
    optimizer = OptimizerConfig(lr=3e-3, warmup_steps=2, schedule="cosine", decay_steps=12)
    policy = MegatronPolicy(PolicyConfig(optimizer=optimizer), folder)
    opened.append(policy)
    ids = [i * 7 % VOCAB for i in range(24)]
    mask = tuple(i > 3 for i in range(24))
    batch = [TrainSequence(ids=tuple(ids), loss_mask=mask, advantages=(1.0,) * 24)]
    steps = [policy.train_step(batch, NegativeLogLikelihood()) for _ in range(12)]
    assert steps[-1].loss < 0.5 * steps[0].loss
    assert steps[0].learning_rate == pytest.approx(1.5e-3)
    assert steps[0].metrics.keys() == {"actor/entropy"}


def test_the_reference_stays_while_the_policy_moves(
    folder: Path, opened: list[MegatronPolicy]
) -> None:
    policy = MegatronPolicy(
        PolicyConfig(optimizer=OptimizerConfig(lr=1e-2)), folder, keep_reference=True
    )
    opened.append(policy)
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


def test_the_reference_may_be_another_model_of_another_size(
    tmp_path: Path, folder: Path, opened: list[MegatronPolicy]
) -> None:
    other = write_model(
        tmp_path / "other", "qwen3", tied=False, hidden_size=96, num_hidden_layers=2
    )
    policy = MegatronPolicy(
        PolicyConfig(optimizer=OptimizerConfig(lr=1e-2)),
        folder,
        keep_reference=True,
        reference_path=tmp_path / "other",
    )
    opened.append(policy)
    batch = sequences()
    before = policy.logprobs(batch)
    scores = policy.reference_logprobs(batch, temperature=0.7)
    for s, got in zip(batch, scores, strict=True):
        ids = torch.tensor(s.ids)
        with torch.no_grad():
            logp = (other(ids[None]).logits[0, :-1] / 0.7).log_softmax(-1)
        want = torch.cat([torch.zeros(1), logp.gather(1, ids[1:, None])[:, 0]])
        want = want * torch.tensor(s.loss_mask)
        assert got == pytest.approx(want.tolist(), abs=1e-4)
    assert policy.logprobs(batch) == before
    policy.train_step(batch, ClippedSurrogate())
    assert policy.logprobs(batch) != before
    assert policy.reference_logprobs(batch, temperature=0.7) == scores
    estimate = estimate_memory(
        policy.architecture,
        PolicyConfig(),
        rows=64,
        reference=True,
        other_reference=Architecture.from_folder(tmp_path / "other"),
    )
    assert isinstance(policy._reference, torch.nn.Module)
    assert estimate.reference == sum(p.nbytes for p in policy._reference.parameters())


def _advantage(sequence: TrainSequence) -> float:
    assert isinstance(sequence.advantages, float)
    return sequence.advantages


def test_a_student_learns_the_distribution_of_its_teacher(
    tmp_path: Path, opened: list[MegatronPolicy]
) -> None:
    """Only by what it samples itself; the reverse KL over the whole vocabulary is exact here."""
    ids, prompt = 16, (3, 5)
    write_model(tmp_path / "student", vocab_size=ids)
    write_model(tmp_path / "teacher", "llama", vocab_size=ids, hidden_size=32)
    policy = MegatronPolicy(
        PolicyConfig(optimizer=OptimizerConfig(lr=1e-3)),
        tmp_path / "student",
        keep_reference=True,
        reference_path=tmp_path / "teacher",
    )
    opened.append(policy)
    every = [
        TrainSequence(ids=(*prompt, v), loss_mask=(False, False, True), advantages=0.0)
        for v in range(ids)
    ]
    teacher = np.array([each[-1] for each in policy.reference_logprobs(every, temperature=0.3)])

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
    assert began > 0.2
    assert reverse_kl() < 0.5 * began


def test_bfloat16_trains_and_exports_bfloat16(folder: Path, opened: list[MegatronPolicy]) -> None:
    policy = MegatronPolicy(
        PolicyConfig(dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-3)), folder
    )
    opened.append(policy)
    batch = sequences()
    stats = policy.train_step(batch, ClippedSurrogate())
    on_policy = -sum(_advantage(s) * s.num_loss_tokens for s in batch) / stats.num_loss_tokens
    assert stats.loss == pytest.approx(on_policy, abs=1e-6)
    assert not stats.skipped
    assert {t.tensor.dtype for t in policy.export_weights()} == {torch.bfloat16}
    assert {spec.element_type for spec in policy.weight_specs()} == {"bfloat16"}


def test_what_cannot_be_built_is_refused(
    tmp_path: Path, folder: Path, opened: list[MegatronPolicy]
) -> None:

    with pytest.raises(FileNotFoundError, match=r"no config.json"):
        MegatronPolicy(PolicyConfig(), tmp_path)
    with pytest.raises(UnsupportedModelError, match="tensor=4 does not divide the model's 2 key"):
        Architecture.from_folder(folder).check_parallel(tensor=4, pipeline=1)
    with pytest.raises(ValueError, match=r"need 2 ranks, but 1 were started"):
        MegatronPolicy(PolicyConfig(parallel=ParallelConfig(data=2)), folder, Rendezvous())


def test_mixed_optional_fields_are_refused(folder: Path, opened: list[MegatronPolicy]) -> None:
    policy = MegatronPolicy(PolicyConfig(), folder)
    opened.append(policy)
    batch = sequences()
    batch[0] = replace(batch[0], old_logprobs=FloatArray((0.0,) * len(batch[0].ids)))
    with pytest.raises(ValueError, match="1 of 8 sequences have old_logprobs"):
        policy.train_step(batch, ClippedSurrogate())
    with pytest.raises(RuntimeError, match="keep_reference"):
        policy.reference_logprobs(batch)
