"""The plan's lines about what a run uses: model, rows, loops, tools and reward."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import TYPE_CHECKING

from treadle.policy.backends.description import rank_memory
from treadle.tools.rewards import name_for_source, short_name
from treadle.trainer.config.schema import Config
from treadle.trainer.data import Prompt
from treadle.trainer.data.load_data import Inputs
from treadle.trainer.own_code import OwnCode

if TYPE_CHECKING:
    from treadle.policy.backends.description import BackendDescription, ModelShape, RankMemory
    from treadle.policy.config.policy import LoraConfig

__all__ = ["describe", "memory_line", "size_in_words"]


def describe(
    config: Config,
    own: OwnCode,
    inputs: Inputs,
    backend: BackendDescription,
    architecture: ModelShape,
) -> Iterator[tuple[str, str]]:
    """Yields (what, which), one pair per line of the plan."""
    yield (
        "architecture",
        f"{architecture.model_type}, {_parameters(architecture.num_parameters)} parameters, "
        f"context of {architecture.max_positions} tokens",
    )
    if config.policy.lora.rank:
        yield "adapter", _adapter(config.policy.lora, backend, architecture)
    yield "data sources", _counted(inputs, _sources)
    yield "reward", _reward(config, own, inputs)
    yield "agent loops", _counted(inputs, lambda prompt: [prompt.loop])
    yield "tools", _counted(inputs, lambda prompt: inputs.rules.tools_of(prompt.row)) or "none"
    yield "prompt lengths", _lengths(inputs)


def _adapter(lora: LoraConfig, backend: BackendDescription, architecture: ModelShape) -> str:
    adapted, trained = backend.adapters(architecture, lora)
    return (
        f"rank {lora.rank}, alpha {lora.alpha:g} on {', '.join(adapted)}: "
        f"{_parameters(trained)} parameters are trained, "
        f"{_parameters(architecture.num_parameters)} are frozen"
    )


def memory_line(
    config: Config,
    backend: BackendDescription,
    architecture: ModelShape,
    num_trajectories: int,
    reference: ModelShape | None = None,
) -> tuple[str, RankMemory]:
    """Returns the estimate for the plan, in words and in bytes."""
    policy, context = config.policy, config.rollout.context_length
    at_most = -(-num_trajectories * context // policy.parallel.data)
    rows = min(max(policy.micro_batch_tokens * policy.parallel.context, context), at_most)
    found = backend.memory(
        architecture,
        policy,
        rows=rows,
        reference=config.algorithm.keeps_reference,
        other_reference=reference,
    )
    critic, kept = None, 0
    if config.algorithm.needs_critic:
        critic = backend.critic_memory(architecture, policy, rows=rows)
        kept = critic.weights + critic.gradients + critic.optimizer
    memory = rank_memory(policy.offload, found, critic)
    parts = [
        f"weights {size_in_words(found.weights)}",
        f"gradients {size_in_words(found.gradients)}",
        f"optimizer {size_in_words(found.optimizer)}",
        *([f"reference {size_in_words(found.reference)}"] if found.reference else []),
        *([f"critic {size_in_words(kept)}"] if kept else []),
        f"{rows} tokens of a micro-batch {size_in_words(found.activations)}",
    ]
    line = f"about {size_in_words(memory.peak)} and the process itself: {', '.join(parts)}"
    if policy.offload.names:
        between, host = size_in_words(memory.between), size_in_words(memory.host)
        line += f"; {between} between its phases, then {host} on the host"
    return line, memory


def _sources(prompt: Prompt) -> list[str]:
    return [str(prompt.row.columns.get("data_source"))]


def _reward(config: Config, own: OwnCode, inputs: Inputs) -> str:
    scored = {prompt.loop: inputs.rules.scored_by_loop(prompt.row) for prompt in _all(inputs)}
    if all(scored.values()):
        return "what the agent loop or its tools give, for all rows"
    which = "the rows whose agent loop gives none" if any(scored.values()) else "all rows"
    settings = config.reward
    if own.reward is not None:
        return f"the function given to train, for {which}"
    mode = "" if settings.mode is None else f", mode {settings.mode}"
    if settings.names:
        weights = {name: settings.weights.get(short_name(name)) for name in settings.names}
        shown = [n if w is None else f"{w:g} x {n}" for n, w in weights.items()]
        return f"{' + '.join(shown)}, for {which}{mode}"
    left = (prompt for prompt in _all(inputs) if not scored[prompt.loop])
    every = sorted({source for prompt in left for source in _sources(prompt)})
    return ", ".join(f"{name_for_source(source)} for {source}" for source in every) + mode


def _counted(inputs: Inputs, names: Callable[[Prompt], Iterable[str]]) -> str:
    """Returns each name with the number of training and validation rows that have it."""
    train, val = (
        Counter(name for prompt in prompts for name in names(prompt))
        for prompts in (inputs.train, inputs.val)
    )
    return ", ".join(f"{name} ({_rows(train[name], val[name])})" for name in sorted({*train, *val}))


def _rows(train: int, val: int) -> str:
    counts = [(train, "training"), (val, "validation")]
    return ", ".join(f"{count} {split}" for count, split in counts if count) + " rows"


def _lengths(inputs: Inputs) -> str:
    lengths = [prompt.num_tokens for prompt in _all(inputs)]
    return (
        f"{min(lengths)} to {max(lengths)} tokens, median {median(lengths):.0f}, "
        f"of at most {inputs.rules.max_prompt_tokens}"
    )


def _all(inputs: Inputs) -> Iterator[Prompt]:
    return itertools.chain(inputs.train, inputs.val)


def _parameters(count: int) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def size_in_words(count: int) -> str:
    """Returns a number of bytes, rounded, with its unit."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"
