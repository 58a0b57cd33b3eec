"""Replayed routing in a policy of one process, against transformers with the same experts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.agent_loop import RoutedExperts
from treadle.policy.algorithms.choose_loss import policy_loss
from treadle.policy.backends.megatron.architecture import Architecture
from treadle.policy.backends.megatron.backend import MegatronPolicy
from treadle.policy.backends.megatron.experts.routing import replayed_indices
from treadle.policy.client.types import TrainSequence
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.policy import MoeConfig, PolicyConfig
from treadle.policy.testing.tiny import forked_sequences, sequences, write_model

LAYERS = (0, 2)
EXPERTS, TOP_K = 8, 2
LOSS = policy_loss(AlgorithmConfig())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("model")
    return folder, write_model(folder, "qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1])


def random_experts(sequence: TrainSequence, rows: int, seed: int = 0) -> RoutedExperts:
    """The same for sequences that begin alike."""
    ids = bytearray()
    for row in range(rows):
        draw = torch.Generator().manual_seed(hash((sequence.ids[: row + 1], seed)) % 2**62)
        for _ in LAYERS:
            ids += bytes(torch.randperm(EXPERTS, generator=draw)[:TOP_K].tolist())
    return RoutedExperts(first=0, num_layers=2, top_k=TOP_K, id_bytes=1, data=bytes(ids))


def with_experts(batch: Sequence[TrainSequence]) -> list[TrainSequence]:
    return [replace(s, routed_experts=random_experts(s, len(s.ids) - 1)) for s in batch]


@contextmanager
def opened(folder: Path, *, replaying: bool = True, **settings: Any) -> Iterator[MegatronPolicy]:
    moe = MoeConfig(routing_replay=replaying)
    policy = MegatronPolicy(PolicyConfig(moe=moe, **settings), folder, keep_reference=True)
    try:
        yield policy
    finally:
        policy.close()


@contextmanager
def forced(model: Any, experts: RoutedExperts) -> Iterator[None]:
    """Makes the routers of transformers choose these experts, with the weights of their scores."""
    ids = torch.tensor(list(experts.data)).view(-1, len(LAYERS), TOP_K)
    hooks = []
    for place, layer in enumerate(LAYERS):

        def choose(_: Any, __: Any, output: Any, place: int = place) -> Any:
            logits, weights, own = output
            told = ids[: len(own), place]
            known = torch.cat([told, own[len(told) :]])
            scores = logits.softmax(-1, dtype=torch.float).gather(1, known)
            return logits, (scores / scores.sum(-1, keepdim=True)).to(weights.dtype), known

        hooks.append(model.model.layers[layer].mlp.gate.register_forward_hook(choose))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def hf_logprobs(model: Any, sequence: TrainSequence) -> torch.Tensor:
    ids = torch.tensor([sequence.ids])
    assert sequence.routed_experts is not None
    with forced(model, sequence.routed_experts):
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    chosen: torch.Tensor = logprobs[torch.tensor(sequence.loss_mask[1:])]
    return chosen


def test_the_policy_computes_with_the_experts_it_is_given(model: tuple[Path, Any]) -> None:
    """Log-probabilities and the gradient, that of the routers included, equal transformers'."""
    folder, hf = model
    batch = with_experts(sequences((18, 41, 9)))
    # Of this one, the engine told the experts of some rows only; the others choose.
    batch[1] = replace(batch[1], routed_experts=random_experts(batch[1], 30))
    with opened(folder) as policy:
        found = policy.logprobs(batch)
        reference = policy.reference_logprobs(batch)
        stats = policy.train_step(batch, LOSS)
    with opened(folder, replaying=False) as policy:
        assert reference == policy.logprobs(batch)
    hf.zero_grad()
    total = sum(s.num_loss_tokens for s in batch)
    for sequence, logprobs, own in zip(batch, found, reference, strict=True):
        want = hf_logprobs(hf, sequence)
        got = torch.tensor([p for p, m in zip(logprobs, sequence.loss_mask, strict=True) if m])
        torch.testing.assert_close(got, want.detach(), rtol=0, atol=2e-5)
        assert max(abs(a - b) for a, b in zip(logprobs, own, strict=True)) > 0.01
        assert isinstance(sequence.advantages, float)
        loss: Any = -sequence.advantages * want.sum() / total
        loss.backward()
    norm = sum(float(p.grad.square().sum()) for p in hf.parameters() if p.grad is not None) ** 0.5
    assert stats.grad_norm == pytest.approx(norm, rel=1e-4)
    rows = 17 + 40 + 8
    assert stats.metrics["moe/replayed_rows"] == pytest.approx((17 + 30 + 8) / rows)
    assert 0.5 < stats.metrics["moe/replay_changed"] < 0.95  # of 8 experts, 2 are chosen


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_rows_that_are_shared_and_recomputed_keep_their_experts(
    model: tuple[Path, Any], recompute: str
) -> None:
    batch = with_experts(forked_sequences(groups=2))
    results = []
    for share in ("never", "always"):
        settings: dict[str, Any] = {
            "share_prefixes": share,
            "micro_batch_tokens": 90,
            "recompute": recompute,
        }
        with opened(model[0], **settings) as policy:
            results.append((policy.logprobs(batch), policy.train_step(batch, LOSS)))
    (flat, one), (shared, other) = results
    for got, want in zip(shared, flat, strict=True):
        assert got == pytest.approx(want, abs=2e-5)
    assert other.num_rows < one.num_rows
    assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    for stats in (one, other):
        assert stats.metrics["moe/replayed_rows"] == 1.0


def test_without_the_setting_experts_are_not_looked_at(model: tuple[Path, Any]) -> None:
    batch = sequences((12, 20))
    with opened(model[0], replaying=False) as policy:
        assert policy.logprobs(with_experts(batch)) == policy.logprobs(batch)
        metrics = policy.train_step(with_experts(batch), LOSS).metrics
    assert not [name for name in metrics if "replay" in name]


def test_rows_of_dense_layers_and_of_padding_have_no_experts(model: tuple[Path, Any]) -> None:
    architecture = Architecture.from_folder(model[0])
    wide = RoutedExperts(first=0, num_layers=2, top_k=2, id_bytes=2, data=bytes(range(8)) * 4)
    wide = replace(wide, data=b"".join(bytes((i % 8, 0)) for i in range(16)))
    found = replayed_indices([(wide, range(2, 6)), (None, range(1))], architecture, padding=1)
    assert found is not None
    assert found.tolist() == [
        [[0, 1], [-1, -1], [2, 3]],
        [[4, 5], [-1, -1], [6, 7]],
        *[[[-1, -1]] * 3] * 4,
    ]
    assert replayed_indices([(None, range(3))], architecture) is None


@pytest.mark.parametrize(
    ("layers", "data", "message"),
    [
        (1, bytes(8), "reports 2 experts in 1 layers, up to number 0, and the policy chooses 2 of"),
        (2, bytes([9] * 8), "up to number 9, and the policy chooses 2 of 8 in 2: serve the model"),
    ],
)
def test_experts_of_another_model_are_refused(
    model: tuple[Path, Any], layers: int, data: bytes, message: str
) -> None:
    other = RoutedExperts(first=0, num_layers=layers, top_k=2, id_bytes=1, data=data)
    with pytest.raises(ValueError, match=message):
        replayed_indices([(other, range(2))], Architecture.from_folder(model[0]))
