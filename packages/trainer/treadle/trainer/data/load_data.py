"""The inputs: rows, tokenizer and reward of a run, read and checked before the first step.

Invariant: what `prepare` returns can be trained on. Everything that can be wrong with the user's
files is an error here, named with file and row. Takes seconds; the caller decides on which thread.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treadle.agent_loop import RewardFn, SetupError
from treadle.tools import rewards
from treadle.trainer.config.schema import RunConfig
from treadle.trainer.data import Prompt, PromptRules, Row, make_prompts, read_rows

if TYPE_CHECKING:
    from treadle.agent_loop.hf import HfRenderer

__all__ = ["Inputs", "Rows", "prepare", "read_all_rows"]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a run."""

    train: Sequence[Row]
    val: Sequence[Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The user's files, read and checked; `notes` is worth a line each at start."""

    renderer: "HfRenderer"
    rules: PromptRules
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


def prepare(config: RunConfig, rows: Rows, rules: PromptRules) -> Inputs:
    """Loads the tokenizer, and decides about every row.

    Raises:
        SetupError: the model's context is too short, or the tokenizer or the reward cannot be
            used.
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

    renderer = HfRenderer.from_directory(
        config.model.path,
        parser=config.agent.parser,
        template_kwargs=config.agent.template_kwargs,
    )
    if config.reward.name is None:
        every = [*rows.train, *rows.val]
        sources = (row.columns.get("data_source") for row in every)
        rewards.check_data_sources(sources, mode=config.reward.mode)
    train = make_prompts(rows.train, split="train", rules=rules, renderer=renderer)
    val = None
    if rows.val:
        val = make_prompts(rows.val, split="val", rules=rules, renderer=renderer)
    return Inputs(
        renderer=renderer,
        rules=rules,
        reward=reward,
        train=train.prompts,
        val=() if val is None else val.prompts,
        notes=(*train.notes, *(() if val is None else val.notes)),
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
