"""One process with experts, against transformers and torch: choices, replay, the balancing loss."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from treadle.policy.algorithms.choose_loss import policy_loss
from treadle.policy.algorithms.losses import ClippedSurrogate
from treadle.policy.backends.description import UnsupportedModelError
from treadle.policy.backends.megatron.architecture import Architecture
from treadle.policy.backends.megatron.backend import MegatronPolicy
from treadle.policy.backends.megatron.experts.routing import Routing
from treadle.policy.backends.megatron.packing import MicroBatch, Packer
from treadle.policy.client.types import TrainSequence
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.policy import LoraConfig, MoeConfig, OptimizerConfig, PolicyConfig
from treadle.policy.testing.tiny import sequences, write_model

LENGTHS = (18, 41, 9)
COEF = 0.05


@pytest.fixture
def opened() -> Iterator[list[MegatronPolicy]]:
    """Policies to be closed at the end; one at a time can be open in a process."""
    policies: list[MegatronPolicy] = []
    yield policies
    for policy in policies:
        policy.close()


@pytest.fixture(scope="module", params=[True, False], ids=["normalised", "not normalised"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = tmp_path_factory.mktemp("model") / "moe"
    write_model(
        path, "qwen3_moe", norm_topk_prob=request.param, num_hidden_layers=3, mlp_only_layers=[1]
    )
    return path


def reference(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def logp_of(model: Any, sequence: TrainSequence) -> Tensor:
    """Returns [L] log-probabilities of the loss tokens, 0 elsewhere."""
    ids = torch.tensor(sequence.ids)
    logp = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), logp]) * torch.tensor(sequence.loss_mask)


def test_a_folder_is_loaded_computed_and_saved_as_transformers_does(
    folder: Path, tmp_path: Path, opened: list[MegatronPolicy]
) -> None:
    policy = MegatronPolicy(PolicyConfig(), folder)
    opened.append(policy)
    model = reference(folder)
    batch = sequences(LENGTHS)
    with torch.no_grad():
        for sequence, got in zip(batch, policy.logprobs(batch), strict=True):
            assert got == pytest.approx(logp_of(model, sequence).tolist(), abs=1e-5)
    assert policy.architecture.num_parameters == sum(p.numel() for p in model.parameters())
    policy.save_hf(tmp_path / "saved")
    for got, want in zip(
        reference(tmp_path / "saved").parameters(), model.parameters(), strict=True
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("micro_batch_tokens", [2, 8192], ids=["each alone", "all together"])
def test_a_step_with_the_balancing_loss_is_that_of_torch(
    folder: Path, opened: list[MegatronPolicy], micro_batch_tokens: int
) -> None:
    batch = sequences(LENGTHS)
    config = PolicyConfig(
        optimizer=OptimizerConfig(lr=1e-3),
        moe=MoeConfig(aux_loss_coef=COEF),
        micro_batch_tokens=micro_batch_tokens,
        share_prefixes="never",
    )
    policy = MegatronPolicy(config, folder)
    opened.append(policy)
    stats = policy.train_step(batch, policy_loss(AlgorithmConfig()))

    model = reference(folder)
    num_tokens = sum(s.num_loss_tokens for s in batch)
    rows = [s.ids[: max(t for t, m in enumerate(s.loss_mask) if m)] for s in batch]
    loss = torch.zeros(())
    for s in batch:
        logp = logp_of(model, s)
        assert isinstance(s.advantages, float)
        loss = loss - (logp - logp.detach()).exp()[list(s.loss_mask)].sum() * s.advantages
    loss = loss / num_tokens
    # Of a causal model, the rows of a sequence do not depend on what comes after.
    logits = [model(torch.tensor([ids]), output_router_logits=True).router_logits for ids in rows]
    micro_batches = [[x] for x in logits] if micro_batch_tokens == 2 else [logits]
    total = sum(map(len, rows))
    whole = balance([torch.cat(layer) for layer in zip(*logits, strict=True)], 2)
    for micro in micro_batches:
        layers = [torch.cat(layer) for layer in zip(*micro, strict=True)]
        loss = loss + COEF * sum(balance(layers, 2)) * len(layers[0]) / total
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    assert stats.grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert stats.metrics["moe/load_balance_loss"] == pytest.approx(float(sum(whole)) / 2, abs=1e-5)
    counts = [torch.cat(x).topk(2).indices.flatten().bincount() for x in zip(*logits, strict=True)]
    most = sum(8 * float(c.max() / c.sum()) for c in counts) / len(counts)
    assert stats.metrics["moe/max_load"] == pytest.approx(most, abs=1e-6)


def balance(layers: Sequence[Tensor], per_token: int) -> list[Tensor]:
    """Returns E sum_e f_e p_e of each layer's [P, E] logits."""
    losses = []
    for logits in layers:
        scores = logits.softmax(-1)
        chosen = torch.zeros_like(scores).scatter(1, scores.topk(per_token).indices, 1.0)
        shares = chosen.sum(0) / chosen.sum()
        losses.append(scores.shape[1] * (shares * scores.mean(0)).sum())
    return losses


def micro_batch(policy: MegatronPolicy, batch: Sequence[TrainSequence]) -> MicroBatch:
    packer = Packer(batch, [1.0] * len(batch), at=torch.device("cpu"))
    lengths = [len(s.ids) for s in batch]
    return packer.micro_batch(sorted(range(len(batch)), key=lengths.__getitem__))


def hidden(policy: MegatronPolicy, micro: MicroBatch) -> Tensor:
    out: Tensor = policy._model(micro.ids_1P, micro.positions_P, micro.segments)
    return out[:, 0]


def test_replayed_choices_are_those_of_transformers_with_the_same_choices(
    folder: Path, opened: list[MegatronPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    policy = MegatronPolicy(PolicyConfig(), folder)
    opened.append(policy)
    (sequence,) = sequences((30,))
    micro = micro_batch(policy, [sequence])
    num_rows = micro.num_rows
    own = hidden(policy, micro)

    draw = torch.Generator().manual_seed(3)
    indices = torch.rand(num_rows, 3, 8, generator=draw).topk(2).indices
    indices[::4] = -1
    micro.segments.routing = Routing(indices_PLK=indices)
    replayed = hidden(policy, micro)
    assert not torch.allclose(replayed, own, atol=1e-2)

    layers = iter([0, 2])

    def forced(router: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = torch.nn.functional.linear(x.view(-1, x.shape[-1]), router.weight)
        scores, told = logits.softmax(-1), indices[:, next(layers)]
        chosen = torch.where(told < 0, scores.topk(2).indices, told)
        weights = scores.gather(1, chosen)
        if router.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen

    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", forced)
    body = reference(folder).model
    want = body(torch.tensor([sequence.ids[:num_rows]])).last_hidden_state[0]
    assert float((replayed - want).abs().max()) < 2e-5


def test_replaying_the_own_choices_changes_no_bit(
    folder: Path, opened: list[MegatronPolicy]
) -> None:
    policy = MegatronPolicy(PolicyConfig(), folder)
    opened.append(policy)
    micro = micro_batch(policy, sequences(LENGTHS))
    chosen: list[Tensor] = []
    routers = [policy._model.decoder.layers[layer].mlp.router for layer in (0, 2)]
    hooks = [r.register_forward_hook(lambda *args: chosen.append(args[2][1])) for r in routers]
    own = hidden(policy, micro)
    for hook in hooks:
        hook.remove()
    first, last = (chosen_PE.int().topk(2).indices for chosen_PE in chosen)
    micro.segments.routing = Routing(indices_PLK=torch.stack([first, first, last], 1))
    assert torch.equal(hidden(policy, micro), own)


def test_adapters_on_experts_are_refused_and_those_of_the_attention_train(
    folder: Path, opened: list[MegatronPolicy]
) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"has gate_proj, up_proj, down_proj, but experts take no"
    ):
        MegatronPolicy(PolicyConfig(lora=LoraConfig(rank=2)), folder)
    lora = LoraConfig(rank=2, targets=("q_proj", "o_proj"))
    policy = MegatronPolicy(
        PolicyConfig(lora=lora, optimizer=OptimizerConfig(lr=0.1)), folder, keep_reference=True
    )
    opened.append(policy)
    batch = sequences(LENGTHS)
    before = policy.logprobs(batch)
    policy.train_step(batch, ClippedSurrogate())
    assert policy.logprobs(batch) != before
    assert policy.reference_logprobs(batch) == before


QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_theta": 1000000.0,
}


def test_a_published_config_is_read() -> None:
    from transformers import AutoConfig

    settings = {k: v for k, v in QWEN3_30B_A3B.items() if k != "model_type"}
    config = AutoConfig.for_model("qwen3_moe", **settings)
    architecture = Architecture.from_config(config)
    assert architecture.num_parameters == 30_532_122_624  # as its card says: 30.5 billion
    assert architecture.experts is not None
    assert architecture.experts.layers == tuple(range(48))
    assert replace(architecture.experts, layers=()) == type(architecture.experts)(
        number=128, per_token=8, ffn_size=768, normalised=True, layers=()
    )
    config.decoder_sparse_step, config.mlp_only_layers = 2, [3]
    some = Architecture.from_config(config).experts
    assert some is not None
    assert some.layers == (1, *range(5, 48, 2))
    config.mlp_only_layers = list(range(48))
    assert Architecture.from_config(config).experts is None
