"""Replayed routing end to end: a server, gRPC, agent loop, ledger, training step.

The model is as wide as all engines need it: vLLM's attention on a CPU takes heads of 32 elements,
its experts multiples of 32.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from treadle.agent_loop import (
    AgentTask,
    Conversation,
    LoopLimits,
    Message,
    SamplingParams,
    Services,
    StopReason,
    Trajectory,
)
from treadle.agent_loop.rpc import Requirements, connect
from treadle.agent_loop.testing import ByteRenderer
from treadle.policy.algorithms.choose_loss import policy_loss
from treadle.policy.backends.megatron.backend import MegatronPolicy
from treadle.policy.backends.megatron.experts.router import ExpertRouter
from treadle.policy.client.types import TrainSequence
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.policy import MoeConfig, OptimizerConfig, PolicyConfig
from treadle.policy.testing.tiny import write_model
from treadle.trainer.training_loop.groups import _sequence

LOSS = policy_loss(AlgorithmConfig())
LAYERS, TOP_K, EXPERTS = 2, 2, 8


def write_sparse_model(path: Path, *, as_published: bool = False) -> Path:
    """Writes a model with two layers of experts.

    Published ones have experts in every layer and a head of their own; others have a dense layer
    between them and a tied head.
    """
    layers: dict[str, Any] = {} if as_published else {"mlp_only_layers": [1]}
    write_model(
        path,
        "qwen3_moe",
        tied=not as_published,
        num_hidden_layers=LAYERS + len(layers),
        **layers,
        hidden_size=128,
        head_dim=32,
        moe_intermediate_size=64,
        vocab_size=ByteRenderer.vocab_size,
    )
    return path


@asynccontextmanager
async def services(address: str) -> AsyncIterator[Services]:
    """Yields what an agent loop needs of a server that reports experts."""
    needs = Requirements(capabilities=frozenset({"sampled_logprobs", "routed_experts"}))
    async with connect([address], requirements=needs) as generator:
        yield Services(
            generator=generator,
            renderer=ByteRenderer(),
            limits=LoopLimits(max_response_tokens=120, max_context_tokens=250),
            sampling=SamplingParams(max_tokens=12, temperature=1.0, seed=3),
            routed_experts=True,
        )


async def _two_turns(services: Services, index: int) -> Trajectory:
    task = AgentTask(
        task_id="t",
        sample_index=0,
        rollout_index=index,
        loop="own",
        messages=(Message(role="user", content="2 + 2?"),),
    )
    with Conversation(task, services) as conversation:
        await conversation.generate()
        assert conversation.answer([Message(role="user", content="Is it 4?")]) is None
        await conversation.generate()
        return conversation.finish(StopReason.FINISHED)


def _chosen_experts(policy: MegatronPolicy, batch: Sequence[TrainSequence]) -> torch.Tensor:
    """Takes one micro-batch through the policy; returns [rows, layers with experts, experts]."""
    chosen: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _router, _args, output: chosen.append(output[1]))
        for module in policy._model.modules()
        if isinstance(module, ExpertRouter)
    ]
    policy.logprobs(batch)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1)


def _reported_experts(sequence: TrainSequence) -> torch.Tensor:
    """The same, of the rows up to the last token's, as the engine reported them."""
    experts = sequence.routed_experts
    assert experts is not None
    ids = torch.tensor(list(experts.data)).view(-1, LAYERS, TOP_K)
    assert len(ids) == len(sequence.ids) - 1
    return torch.zeros(len(ids), LAYERS, EXPERTS, dtype=torch.bool).scatter(2, ids, True)


async def check_replay(folder: Path, address: str) -> None:
    """Trains on conversations with a server of the model: with its experts, and without them."""
    async with services(address) as serving:
        trajectories = await asyncio.gather(*[_two_turns(serving, i) for i in range(3)])
        plain = await _two_turns(replace(serving, routed_experts=False), 0)
    assert plain.samples[0].ids == trajectories[0].samples[0].ids
    assert plain.samples[0].routed_experts is None
    batch = [
        replace(_sequence(t.samples[0], None, 0, {}), advantages=float(i - 1))
        for i, t in enumerate(trajectories)
    ]
    config = PolicyConfig(
        moe=MoeConfig(routing_replay=True),
        optimizer=OptimizerConfig(lr=0.02),
        share_prefixes="never",
    )
    policy = MegatronPolicy(config, folder)
    try:
        for sequence in batch:
            assert torch.equal(_chosen_experts(policy, [sequence]), _reported_experts(sequence))
        fresh = policy.train_step(batch, LOSS).metrics
        assert fresh["moe/replayed_rows"] == 1.0
        assert fresh["moe/replay_changed"] == 0.0
        assert fresh["rollout/logprob_diff_max"] < 1e-4, fresh
        # The weights have changed, and with them what the policy would choose.
        stale = policy.train_step(batch, LOSS).metrics
        assert stale["moe/replayed_rows"] == 1.0
        assert stale["moe/replay_changed"] > 0.05
        for sequence in batch:
            assert torch.equal(_chosen_experts(policy, [sequence]), _reported_experts(sequence))
        free = [replace(sequence, routed_experts=None) for sequence in batch]
        assert not torch.equal(_chosen_experts(policy, free[:1]), _reported_experts(batch[0]))
        assert policy.logprobs(batch) != policy.logprobs(free)
    finally:
        policy.close()
