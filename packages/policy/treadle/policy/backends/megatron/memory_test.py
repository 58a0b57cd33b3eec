import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from treadle.policy.algorithms.choose_loss import policy_loss
from treadle.policy.backend import Rendezvous
from treadle.policy.backends.description import MemoryEstimate, RankMemory, rank_memory
from treadle.policy.backends.megatron.architecture import Architecture
from treadle.policy.backends.megatron.backend import MegatronPolicy
from treadle.policy.backends.megatron.memory import estimate_memory, stage_parameters
from treadle.policy.backends.megatron.packing import MicroBatch, Packer
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.policy import OffloadConfig, ParallelConfig, PolicyConfig
from treadle.policy.testing.ranks import RankTask, run_ranks
from treadle.policy.testing.tiny import sequences, write_model

_ROWS = 1024
_TOLERANCE = 0.15


_SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32}


def _model(name: str, tmp_path: Path) -> Path:
    name, _, wide = name.partition(":")
    write_model(tmp_path, name, **(_SIZES | {"vocab_size": 1024} if wide else {}))
    return tmp_path


def _bytes(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Returns the bytes of each piece of memory, by its address."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _peak_of_a_step(policy: MegatronPolicy, rows: int, parts: int) -> tuple[int, int]:
    """Returns the most bytes that a step allocates at a time, and its loss tokens."""
    batch = sequences((rows // parts + 1,) * parts)  # the last token goes not through the model
    loss = policy_loss(AlgorithmConfig())
    policy.train_step(batch, loss)  # what the first step alone allocates stays
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        policy.train_step(batch, loss)
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak, sum(sequence.num_loss_tokens for sequence in batch)


@pytest.mark.parametrize(
    ("name", "dtype", "recompute", "chunk", "rank"),
    [
        ("qwen2", "float32", "none", 256, 0),
        ("qwen3", "bfloat16", "none", 4096, 0),
        ("qwen3_moe", "float32", "none", 4096, 0),
        ("qwen3_moe", "bfloat16", "none", 256, 0),
        ("qwen3_moe", "float32", "full", 256, 0),
        ("mistral", "float32", "none", 256, 0),
        ("glm4", "bfloat16", "none", 256, 0),
        ("gemma2", "float32", "none", 256, 0),
        ("gemma3_text", "bfloat16", "none", 256, 0),
        ("llama", "float32", "full", 4096, 0),
        ("llama", "float32", "selective", 256, 0),
        ("qwen2:wide", "float32", "none", 4096, 0),
        ("qwen2:wide", "bfloat16", "full", 4096, 0),
        ("qwen2:wide", "bfloat16", "none", 4096, 4),
    ],
)
def test_the_estimate_is_what_is_allocated(
    tmp_path: Path, name: str, dtype: str, recompute: str, chunk: int, rank: int
) -> None:
    config = PolicyConfig.model_validate(
        {
            "dtype": dtype,
            "recompute": recompute,
            "recompute_modules": ["core_attn", "mlp"],
            "logits_chunk_tokens": chunk,
            "micro_batch_tokens": _ROWS,
            "lora": {"rank": rank},
        }
    )
    policy = MegatronPolicy(config, _model(name, tmp_path), keep_reference=True)
    try:
        peak, loss_rows = _peak_of_a_step(policy, _ROWS, _ROWS // 64)
        weights = _bytes(list(policy._model.parameters()))
        buffers = policy._net.buffers + policy._net.expert_parallel_buffers
        gradients = _bytes([buffer.grad_data for buffer in buffers])
        adam = policy._optimizer.adam_state
        state = [t for each in adam.values() for t in each.values() if t.dim()]
        state += adam
        optimizer = {at: size for at, size in _bytes(state).items() if at not in weights}
        assert not isinstance(policy._reference, torch.nn.Module)
        reference = _bytes(policy._reference or [])
        architecture = policy.architecture
    finally:
        policy.close()
    found = estimate_memory(architecture, config, rows=_ROWS, loss_rows=loss_rows, reference=True)
    assert found.weights == sum(weights.values())
    assert found.gradients == sum(gradients.values())
    assert found.optimizer == sum(optimizer.values())
    assert found.reference == sum(reference.values())
    assert found.activations == pytest.approx(peak, rel=_TOLERANCE)


SPREAD = PolicyConfig(
    parallel=ParallelConfig(context=2), micro_batch_tokens=_ROWS // 2, logits_chunk_tokens=128
)


def measure(task: RankTask) -> tuple[int, int]:
    place = Rendezvous(rank=task.rank, world_size=task.num_ranks, shared_file=task.folder / "store")
    policy = MegatronPolicy(SPREAD, task.argument, place)
    try:
        return _peak_of_a_step(policy, _ROWS, 1)
    finally:
        policy.close()


def test_context_ranks_share_the_activations_of_one_sequence(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen2")
    architecture = Architecture.from_folder(tmp_path)
    ranks = run_ranks(f"{__name__}:measure", 2, tmp_path)
    for peak, loss_rows in ranks:
        shared, whole = (
            estimate_memory(architecture, config, rows=_ROWS, loss_rows=loss_rows).activations
            for config in (SPREAD, SPREAD.model_copy(update={"parallel": ParallelConfig()}))
        )
        assert shared == pytest.approx(peak, rel=_TOLERANCE)
        assert peak < 0.6 * whole


def test_the_batch_may_be_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the tokens take four micro-batches, one after the other, in the same memory."""
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def counted(packer: Packer, *args: Any) -> MicroBatch:
        nonlocal most
        made = micro_batch(packer, *args)
        alive.append(weakref.ref(made.ids_1P))
        most = max(most, sum(tensor() is not None for tensor in alive))
        return made

    micro_batch = Packer.micro_batch
    monkeypatch.setattr(Packer, "micro_batch", counted)
    policy = MegatronPolicy(
        PolicyConfig(micro_batch_tokens=_ROWS, share_prefixes="never"), _model("qwen2", tmp_path)
    )
    try:
        once, _ = _peak_of_a_step(policy, _ROWS, _ROWS // 64)
        alive.clear()
        four_times, _ = _peak_of_a_step(policy, 4 * _ROWS, 4 * _ROWS // 64)
        assert len(alive) == 2 * 4
        # A sequence longer than a micro-batch is one by itself, and needs the memory for it.
        stats = policy.train_step(sequences((200, 2 * _ROWS, 300)), policy_loss(AlgorithmConfig()))
    finally:
        policy.close()
    assert four_times == pytest.approx(once, rel=0.02)
    assert most <= 2  # the one that is computed, and the next while it is made
    assert stats.num_micro_batches == 2
    assert not stats.skipped


QWEN_HALF_BILLION = Architecture(
    model_type="qwen2",
    num_layers=24,
    hidden_size=896,
    ffn_size=4864,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=151936,
    max_positions=32768,
    norm_eps=1e-6,
    rope_theta=1e6,
    tied=True,
    qkv_bias=True,
    qk_norm=False,
)


def test_the_parameters_of_a_rank() -> None:
    def count(stage: int = 0, **parallel: int) -> int:
        policy = PolicyConfig(parallel=ParallelConfig.model_validate(parallel))
        return stage_parameters(QWEN_HALF_BILLION, policy, stage=stage)

    assert count() == 494_032_768  # as its model card says
    table, norms = 151936 * 896, 49 * 896
    assert 2 * count(tensor=2) == 494_032_768 + norms  # each rank has all norms
    # The last stage has a copy of the tied embedding.
    assert count(0, pipeline=2) + count(1, pipeline=2) == 494_032_768 + table
    assert count(data=8) == count(context=2) == count()


def test_the_memory_of_a_rank_by_hand() -> None:
    """Qwen2.5-0.5B in bfloat16 on 2 x 1 x 4 ranks, from the numbers of its config.json."""
    policy = PolicyConfig(
        dtype="bfloat16",
        parallel=ParallelConfig(tensor=2, data=4, sequence=True),
        logits_chunk_tokens=1000,
    )
    found = estimate_memory(QWEN_HALF_BILLION, policy, rows=8000, reference=True)
    parameters = (494_032_768 + 49 * 896) // 2
    assert (found.weights, found.gradients) == (2 * parameters, 4 * parameters)
    assert (found.optimizer, found.reference) == (3 * parameters, 2 * parameters)
    elements = 6 * 448 + (4 * 4864 + 2 * 896 + 2 * 128) / 2
    layer = 2 * elements + 2 * 4 * 448
    logits = 4 * 1000 * 151936 / 2 + 12 * 2**20
    assert found.activations == round(8000 * (24 * layer + 4 * 896 * 2) + logits)
    assert found.total == 11 * parameters + found.activations


def test_context_ranks_share_the_rows_and_the_optimizer() -> None:
    def found(**parallel: int) -> MemoryEstimate:
        policy = PolicyConfig(
            parallel=ParallelConfig.model_validate(parallel), logits_chunk_tokens=1000
        )
        return estimate_memory(QWEN_HALF_BILLION, policy, rows=8000)

    one, four = found(data=2), found(data=2, context=4)
    assert (four.weights, four.gradients) == (one.weights, one.gradients)
    assert 4 * four.optimizer == pytest.approx(one.optimizer, abs=4)
    head = 8 * 1000 * 151936 + 12 * 2**20  # the same chunk of logits
    assert 4 * (four.activations - head) == pytest.approx(one.activations - head, abs=4)


def test_offload_leaves_the_moments_that_need_most() -> None:
    policy = MemoryEstimate(
        weights=20, gradients=40, optimizer=120, reference=20, activations=50, exchanged=20
    )
    critic = replace(policy, weights=30, reference=0, exchanged=0, activations=30)
    off, everything = (
        OffloadConfig(),
        OffloadConfig(parameters=True, optimizer=True, reference=True),
    )
    assert rank_memory(off, policy) == RankMemory(peak=policy.total, between=200, host=0)
    both = policy.total + 30 + 40 + 120
    assert rank_memory(off, policy, critic) == RankMemory(peak=both, between=390, host=0)
    # Weights and gradients with the larger of activations and the optimizer's state.
    assert rank_memory(everything, policy) == RankMemory(peak=180, between=0, host=160)
    assert rank_memory(everything, policy, critic) == RankMemory(peak=190, between=0, host=310)
    only = rank_memory(OffloadConfig(optimizer=True), policy, critic)
    assert only == RankMemory(peak=150 + 120, between=150, host=240)
    # Another model as the reference, larger than all that training needs.
    other = replace(policy, reference=500, exchanged=0)
    assert rank_memory(everything, other).peak == 520
    assert rank_memory(off, other).peak == other.total


def test_a_stage_holds_the_micro_batches_of_those_after_it() -> None:
    one, four = (
        estimate_memory(
            QWEN_HALF_BILLION,
            PolicyConfig(parallel=ParallelConfig(pipeline=pipeline), logits_chunk_tokens=1),
            rows=1000,
        )
        for pipeline in (1, 4)
    )
    assert four.activations == pytest.approx(one.activations, rel=0.01)
    assert four.weights < 0.5 * one.weights
