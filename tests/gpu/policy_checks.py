"""Checks of the policy in one process: its numbers against transformers, and its memory.

Where torch has CUDA the policy computes on the GPU, and so does the model of transformers here.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from gpu.check import Context, Figures, expect

from treadle.policy.algorithms.choose_loss import policy_loss
from treadle.policy.backends.megatron.backend import MegatronPolicy
from treadle.policy.client.types import TrainSequence
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.policy import OffloadConfig, OptimizerConfig, PolicyConfig
from treadle.policy.testing.tiny import (
    forked_sequences,
    sequences,
    write_model,
)

_Dtype = Literal["float32", "bfloat16"]
# About 0.4 B parameters, so that memory and rates are those of the device.
_LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
_FLOAT32_NATS = 1e-4
_ROUNDING_NATS = 1e-3


def check_logprobs(context: Context) -> Figures:
    """In float32 they are those of transformers, in bfloat16 as near to them as transformers'."""
    exact = _written(context)
    batch = sequences(vocab=exact.config.vocab_size)
    truth = _of_transformers(exact, batch)
    rounded = _of_transformers(exact.to(dtype=torch.bfloat16), batch)
    figures: Figures = {}
    for dtype in ("float32", "bfloat16"):
        with _policy(context, dtype) as policy:
            found = torch.cat([torch.tensor(tuple(each)) for each in policy.logprobs(batch)])
        figures[f"largest difference in {dtype}, nats"] = float((found - truth).abs().max())
        figures[f"mean difference in {dtype}, nats"] = float((found - truth).abs().mean())
    figures["mean difference of transformers in bfloat16, nats"] = float(
        (rounded - truth).abs().mean()
    )
    most = figures["largest difference in float32, nats"]
    expect(
        float(most) < _FLOAT32_NATS,
        f"log-probabilities in float32 differ from transformers' by up to {most} nats, at most "
        f"{_FLOAT32_NATS} are expected",
    )
    ours = float(figures["mean difference in bfloat16, nats"])
    theirs = float(figures["mean difference of transformers in bfloat16, nats"])
    expect(
        ours < 2 * theirs + _ROUNDING_NATS,
        f"bfloat16 changes log-probabilities by {ours:.3g} nats on average in the policy, and by "
        f"{theirs:.3g} in transformers",
    )
    return figures


def check_gradient(context: Context) -> Figures:
    """Loss and norm of the gradient of a step in float32 are those of transformers."""
    reference = _written(context)
    batch = sequences(vocab=reference.config.vocab_size)
    total = sum(s.num_loss_tokens for s in batch)
    loss: Any = torch.zeros((), device=_device(context))
    for s in batch:
        logp, mask = _logprobs(reference, s)
        advantages = torch.as_tensor(s.advantages).to(logp)
        loss = loss - ((logp - logp.detach()).exp() * advantages * mask).sum() / total
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9))
    with _policy(context, "float32") as policy:
        stats = policy.train_step(batch, policy_loss(AlgorithmConfig()))
    seen = f"{stats.loss:.8g} and {stats.grad_norm:.8g}, not {loss.item():.8g} and {norm:.8g}"
    expect(
        abs(stats.loss - loss.item()) < 1e-5 and abs(stats.grad_norm / norm - 1) < 1e-3,
        f"loss and norm of the gradient are {seen}",
    )
    return {"loss": stats.loss, "relative difference of the norm": abs(stats.grad_norm / norm - 1)}


def check_shared_prefixes(context: Context) -> Figures:
    """What samples have in common is computed once, with the same log-probabilities."""
    _written(context)
    batch = forked_sequences()
    found = []
    for share in ("never", "always"):
        with _policy(context, "float32", share_prefixes=share) as policy:
            found.append(torch.cat([torch.tensor(tuple(each)) for each in policy.logprobs(batch)]))
    most = float((found[0] - found[1]).abs().max())
    expect(most < _FLOAT32_NATS, f"they differ by up to {most:.3g} nats")
    return {"largest difference, nats": most}


def check_offload(context: Context) -> Figures:
    """A policy that leaves the device trains as one that stays, and leaves it."""
    size: dict[str, Any] = _LARGE if context.on_gpu else {}
    write_model(context.folder / "model", **size)
    batch = sequences()
    everything = OffloadConfig(parameters=True, optimizer=True, reference=True)
    plain, again = (_losses(context, batch) for _ in range(2))
    with _policy(context, "bfloat16", offload=everything) as policy:
        offloaded = _steps(policy, batch)
        report = policy.take_offload_report()
        gc.collect()  # the policies before are closed, and garbage in cycles
        held = torch.cuda.memory_allocated() if context.on_gpu else 0
    # Some kernels of a GPU add in any order: then runs differ without policy.offload too.
    noise = _distance(plain, again)
    expect(
        _distance(plain, offloaded) <= 2 * noise,
        f"loss and norm of the gradient are {offloaded} with policy.offload and {plain} without; "
        f"two runs without it differ by {noise}",
    )
    expect(report.freed_bytes > 0, "nothing left the device")
    # What stays is small: the context's own memory is not counted by torch.
    expect(
        held < report.freed_bytes / 10 + 64e6,
        f"{held / 1e6:.0f} MB are left on the device, and {report.freed_bytes / 1e6:.0f} MB were "
        "freed",
    )
    return {
        "freed, MB": report.freed_bytes / 1e6,
        "kept in host memory, MB": report.host_bytes / 1e6,
        "left on the device, MB": held / 1e6,
        "released, s": report.release_s,
        "restored, s": report.restore_s,
        "difference of two runs without offload": noise,
    }


def _losses(context: Context, batch: list[TrainSequence]) -> list[tuple[float, float]]:
    with _policy(context, "bfloat16") as policy:
        return _steps(policy, batch)


def _steps(policy: MegatronPolicy, batch: list[TrainSequence]) -> list[tuple[float, float]]:
    """Returns loss and norm of the gradient of three steps, after each of which memory leaves."""
    found = []
    for _ in range(3):
        stats = policy.train_step(batch, policy_loss(AlgorithmConfig()))
        found.append((stats.loss, stats.grad_norm))
        policy.release_memory()
    return found


def _distance(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    pairs = zip(one, other, strict=True)
    return max(abs(a - b) for left, right in pairs for a, b in zip(left, right, strict=True))


def _written(context: Context) -> Any:
    """Writes a random model of four layers; returns it as transformers has it, on the device."""
    model: Any = write_model(context.folder / "model")
    return model.to(_device(context))


def _device(context: Context) -> torch.device:
    return torch.device(context.device)


@contextmanager
def _policy(context: Context, dtype: _Dtype, **settings: Any) -> Iterator[MegatronPolicy]:
    optimizer = OptimizerConfig(lr=1e-3)
    config = PolicyConfig(dtype=dtype, optimizer=optimizer, **settings)
    policy = MegatronPolicy(config, Path(context.folder / "model"))
    try:
        yield policy
    finally:
        policy.close()


def _logprobs(
    model: transformers.PreTrainedModel, sequence: TrainSequence
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-probabilities of ids 1, 2, ..., and whether each is trained on."""
    at: Any = model.device
    ids = torch.tensor(sequence.ids, device=at)
    logp = model(ids[None]).logits[0, :-1].float().log_softmax(-1)
    return logp.gather(-1, ids[1:, None])[:, 0], torch.tensor(sequence.loss_mask[1:], device=at)


@torch.no_grad()
def _of_transformers(model: Any, batch: list[TrainSequence]) -> torch.Tensor:
    """Returns the log-probabilities as `MegatronPolicy.logprobs` does, one after another."""
    rows = []
    for sequence in batch:
        logp, mask = _logprobs(model, sequence)
        rows += [torch.zeros(1), (logp * mask).cpu()]
    return torch.cat(rows)
