"""Tiny text models, their reference answers in transformers, and engines that serve them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from treadle.rollout_server.engine import (
    ElementType,
    EngineEvent,
    EngineRequest,
    Finished,
    FinishReason,
    InFlightPolicy,
    NamedTensor,
    Sampling,
    Started,
    TensorSpec,
    Tokens,
)
from treadle.rollout_server.engines.torch import ModelSource, TorchEngine

EOS = 3
VOCAB_SIZE = 61
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": EOS,
    "bos_token_id": 1,
    "initializer_range": 0.3,  # Large enough for distinct logits.
}
_MODELS: Any = AutoModelForCausalLM
_WINDOW = {"sliding_window": 9}
_SETTINGS: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        **_WINDOW,
    },
    "mistral": _WINDOW,
    "phi3": {**_WINDOW, "partial_rotary_factor": 0.75, "pad_token_id": 0},
    "glm": {"head_dim": 8, "pad_token_id": 0},
    "glm4": {"head_dim": 8, "pad_token_id": 0},
    "gemma": {"head_dim": 8, "tie_word_embeddings": True},
    "gemma2": {**_WINDOW, "head_dim": 8, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**_WINDOW, "head_dim": 8, "sliding_window_pattern": 2},
}
TEXT_TYPES = ("llama", *_SETTINGS)
_IN_ROWS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 2),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
        "num_experts": 4,
        "num_experts_per_tok": 2,
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    },
    "bert": {},
}
"""Models that the engine would run row by row; an encoder is refused."""

ModelDir = Callable[..., Path]


def named_tensors(path: Path, **changes: torch.Tensor | None) -> list[NamedTensor]:
    """Returns the weights in a directory, with changes; None leaves a tensor out."""
    tensors: dict[str, torch.Tensor | None] = {**load_file(path / "model.safetensors"), **changes}
    return [
        NamedTensor(
            spec=TensorSpec(name=name, element_type=ElementType.FLOAT32, shape=tuple(tensor.shape)),
            data=memoryview(bytearray(tensor.numpy().tobytes())),
        )
        for name, tensor in tensors.items()
        if tensor is not None
    ]


def write_model(directory: Path, architecture: str, seed: int) -> None:
    """Writes a tiny model with random weights."""
    torch.manual_seed(seed)
    settings = {
        "tie_word_embeddings": False,
        **_SIZES,
        **{**_SETTINGS, **_IN_ROWS}.get(architecture, {}),
    }
    model = _MODELS.from_config(CONFIG_MAPPING[architecture](**settings))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # Zero by default, which would hide a missing bias.
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)


GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)


@contextlib.asynccontextmanager
async def serving(
    path: Path,
    *,
    max_num_seqs: int = 8,
    prefix_cache_bytes: int = 1 << 20,
    max_draft_tokens: int = 0,
    batch_invariant: bool = False,
) -> AsyncIterator[TorchEngine]:
    """Yields an engine on the CPU and closes it at the end."""
    engine = await TorchEngine.load(
        ModelSource(path=path, dtype=ElementType.FLOAT32, device="cpu", image_cache_bytes=1 << 20),
        max_num_seqs=max_num_seqs,
        num_threads=1,
        prefix_cache_bytes=prefix_cache_bytes,
        max_draft_tokens=max_draft_tokens,
        batch_invariant=batch_invariant,
    )
    try:
        yield engine
    finally:
        await engine.aclose()


@dataclass(frozen=True)
class Output:
    """Everything that one sequence yielded."""

    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    cached: int
    reason: FinishReason


def request(prompt: Sequence[int], sampling: Sampling = GREEDY, **kwargs: Any) -> EngineRequest:
    """Returns a request with log-probs, greedy by default."""
    return EngineRequest(
        request_id="r", prompt=tuple(prompt), sampling=sampling, logprobs=True, **kwargs
    )


def collected(events: Sequence[EngineEvent]) -> Output:
    """Combines the events of one sequence."""
    first, *middle, last = events
    assert isinstance(first, Started) and isinstance(last, Finished)
    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for event in middle:
        assert isinstance(event, Tokens) and event.token_ids
        ids += event.token_ids
        logprobs += event.logprobs
        versions += [event.weight_version] * len(event.token_ids)
    return Output(ids, logprobs, versions, first.cached_prompt_tokens, last.reason)


async def submitted(engine: TorchEngine) -> None:
    """Waits until the tasks created so far have submitted their sequences to the engine."""
    for _ in range(2):  # The first lets the tasks start, the second comes after their calls.
        await engine._thread.call(lambda: None)


async def complete(
    engine: TorchEngine, prompt: Sequence[int], sampling: Sampling = GREEDY, **kwargs: Any
) -> Output:
    """Runs one sequence to its end."""
    stream = engine.generate(request(prompt, sampling, **kwargs))
    return collected([event async for event in stream])


def hf(path: Path) -> Any:
    """Returns the same model in transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    return model.eval()


def hf_greedy(path: Path, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Returns the ids that transformers' `generate` samples, ignoring end-of-sequence ids."""
    inputs = torch.tensor([list(prompt)])
    ids = hf(path).generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return list(ids[0, len(prompt) :].tolist())


def hf_logprobs(path: Path, prompt: Sequence[int], ids: list[int]) -> torch.Tensor:
    """Returns log-probs of `ids` after `prompt`, [len(ids)], at temperature 1."""
    with torch.no_grad():
        logits = hf(path)(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    logprobs: torch.Tensor = logits.log_softmax(-1)
    return logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0]


def chosen(path: Path, ids: Sequence[int]) -> torch.Tensor:
    """Returns the experts of transformers, sorted, [rows, layers with experts, experts]."""
    model = hf(path)
    found: list[torch.Tensor] = []
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda _m, _args, output: found.append(output[-1]))
    with torch.no_grad():
        model(torch.tensor([list(ids)]))
    return torch.stack(found, dim=1).sort(-1).values


def assert_chosen(path: Path, ids: Sequence[int], first: int, routed: bytes) -> None:
    """Asserts that the experts of all rows from `first` on, but the last, are transformers'."""
    want = chosen(path, ids)[first:-1]
    got = torch.frombuffer(bytearray(routed), dtype=torch.uint8).view(want.shape).long()
    assert torch.equal(got.sort(-1).values, want)


def prompts(count: int, *, shared: int = 0, seed: int = 0) -> list[list[int]]:
    """Returns prompts of different lengths that begin with the same `shared` ids."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> list[int]:
        return torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist()

    common = draw(shared)
    return [common + draw(3 + 5 * (i % 4)) for i in range(count)]


LONG = Sampling(max_tokens=110, temperature=0.0, ignore_eos=True)


async def paused_in_flight(
    engine: TorchEngine, policy: InFlightPolicy, *, steps: int = 5, **kwargs: Any
) -> tuple[list[EngineEvent], Any]:
    """Starts a long greedy completion of ``[5, 6, 7]``; pauses by `policy` after some steps."""
    core, step = engine._core, engine._core.step
    standing = asyncio.Event()
    countdown = iter(range(steps - 1, -1, -1))

    def step_and_stop() -> None:
        step()
        if next(countdown) == 0:
            core.step = step  # type: ignore[method-assign]
            core.pause(InFlightPolicy.CONTINUE, standing.set)

    core.step = step_and_stop  # type: ignore[method-assign]
    stream = engine.generate(request([5, 6, 7], LONG, **kwargs))
    events = [await anext(stream)]
    await standing.wait()
    await engine.pause(policy)
    return events, stream


async def weights_of(path: Path, **changes: torch.Tensor | None) -> AsyncIterator[NamedTensor]:
    """Yields `named_tensors`, as `Engine.load_weights` takes them."""
    for tensor in named_tensors(path, **changes):
        yield tensor
