"""The inputs: rows, tokenizer and tools of a run, read and checked before the first step.

Invariant: what `prepare` returns can be trained on. Everything that can be wrong with the user's
files is an error here, named with file and row. Takes seconds; the caller decides on which thread.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treadle.agent_loop import HermesParser, RewardFn, SetupError, Tool
from treadle.tools import load_catalogue, rewards
from treadle.trainer.config.schema import RunConfig
from treadle.trainer.data import Prompt, PromptRules, Row, make_prompts, read_rows
from treadle.trainer.rollout import agent_loops

if TYPE_CHECKING:
    from treadle.agent_loop.hf import HfRenderer

__all__ = ["Inputs", "Rows", "prepare", "read_all_rows"]

_PARSERS = {"hermes": HermesParser}


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a run."""

    train: Sequence[Row]
    val: Sequence[Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The user's files, read and checked; `notes` is worth a line each at start."""

    renderer: "HfRenderer"
    tools: Mapping[str, Tool]
    reward: RewardFn
    train: Sequence[Prompt]
    val: Sequence[Prompt]
    notes: tuple[str, ...]


def read_all_rows(config: RunConfig) -> Rows:
    """The training and validation rows.

    Raises:
        DataError: a file is missing or damaged, or a row lacks a column.
    """
    data = config.data
    val = read_rows(data.val_files, limit=data.max_val_rows) if data.val_files else ()
    return Rows(read_rows(data.train_files), val)


def prepare(config: RunConfig, rows: Rows) -> Inputs:
    """Loads tokenizer and tools, and decides about every row.

    Raises:
        SetupError: the model's context is too short, or the tokenizer, the tools or the reward
            cannot be used.
        DataError: a row cannot be.
    """
    _check_context(config)
    reward = rewards.resolve(
        config.reward.name,
        mode=config.reward.mode,
        timeout_s=config.reward.timeout_s,
        timeout_score=config.reward.timeout_score,
    )
    from treadle.agent_loop.hf import HfRenderer

    parser = _PARSERS[config.agent.parser]()
    renderer = HfRenderer.from_directory(config.model.path, parser=parser)
    catalogue = config.agent.tool_catalogue
    tools = load_catalogue(catalogue) if catalogue is not None else {}
    if config.reward.name is None:
        every = [*rows.train, *rows.val]
        sources = (row.columns.get("data_source") for row in every)
        rewards.check_data_sources(sources, mode=config.reward.mode)
    rules = PromptRules(
        loops=agent_loops(config.agent),
        default_loop=config.agent.default_loop,
        max_prompt_tokens=config.rollout.prompt_length,
        overlong=config.data.overlong_prompts,
    )
    train = make_prompts(rows.train, split="train", rules=rules, renderer=renderer, tools=tools)
    if not rows.val:
        return Inputs(
            renderer=renderer,
            tools=tools,
            reward=reward,
            train=train.prompts,
            val=(),
            notes=train.notes,
        )
    val = make_prompts(rows.val, split="val", rules=rules, renderer=renderer, tools=tools)
    return Inputs(
        renderer=renderer,
        tools=tools,
        reward=reward,
        train=train.prompts,
        val=val.prompts,
        notes=(*train.notes, *val.notes),
    )


def _check_context(config: RunConfig) -> None:
    """Refuses trajectories that may outgrow the model; a missing or odd file is found later."""
    rollout, path = config.rollout, config.model.path / "config.json"
    if not path.is_file():
        return
    longest = json.loads(path.read_text(encoding="utf-8")).get("max_position_embeddings")
    if isinstance(longest, int) and rollout.context_length > longest:
        raise SetupError(
            f"rollout.prompt_length={rollout.prompt_length} + rollout.response_length="
            f"{rollout.response_length} are {rollout.context_length} tokens, and the model in "
            f"{config.model.path} has a context of {longest}: lower one of them"
        )
