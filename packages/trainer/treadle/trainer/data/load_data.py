"""Loads the inputs of a run: rows, tokenizer and reward, checked before the first step.

Invariant: training can start with what `prepare` returns. Every fault of the user's files is an
error here that names file and row. Takes seconds; the caller chooses the thread.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treadle.agent_loop import RewardFn, SetupError
from treadle.tools import rewards
from treadle.trainer.config.schema import Config
from treadle.trainer.data import Prompt, PromptRules, Row, make_prompts, read_rows
from treadle.trainer.own_code import NOTHING, OwnCode

if TYPE_CHECKING:
    from treadle.agent_loop.hf import HfRenderer

__all__ = ["Inputs", "Rows", "prepare", "read_all_rows"]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a run; those of an evaluation are in `val`."""

    train: Sequence[Row]
    val: Sequence[Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The user's files, read and checked; `notes` are lines to print at start."""

    renderer: "HfRenderer"
    rules: PromptRules
    reward: RewardFn
    train: Sequence[Prompt]
    val: Sequence[Prompt]
    notes: tuple[str, ...]


def read_all_rows(config: Config) -> Rows:
    """Returns the training and validation rows.

    Raises:
        DataError: A file is missing or damaged, or a row lacks a column.
    """
    data = config.data
    val = read_rows(data.val_files, limit=data.max_val_rows) if data.val_files else ()
    return Rows(read_rows(data.train_files), val)


def prepare(config: Config, rows: Rows, rules: PromptRules, own: OwnCode = NOTHING) -> Inputs:
    """Loads the tokenizer and the reward, and makes a prompt of every row.

    Args:
        config: The run's configuration.
        rows: As `read_all_rows` gives them.
        rules: What the rows may ask for.
        own: The user's objects beside the configuration.

    Raises:
        SetupError: The model's context is too short, or the tokenizer or the reward cannot be
            used.
        DataError: A row cannot be used.
    """
    _check_context(config)
    reward = own.reward or rewards.resolve(
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
    if config.reward.name is None and own.reward is None:
        every = [*rows.train, *rows.val]
        sources = (row.columns.get("data_source") for row in every)
        rewards.check_data_sources(sources, mode=config.reward.mode)
    train, val = (
        make_prompts(of_split, split=split, rules=rules, renderer=renderer) if of_split else None
        for split, of_split in (("train", rows.train), ("val", rows.val))
    )
    return Inputs(
        renderer=renderer,
        rules=rules,
        reward=reward,
        train=() if train is None else train.prompts,
        val=() if val is None else val.prompts,
        notes=tuple(note for split in (train, val) if split is not None for note in split.notes),
    )


def _check_context(config: Config) -> None:
    """Rejects lengths beyond the model's context; a missing or malformed file is found later."""
    rollout, path = config.rollout, config.model.path / "config.json"
    if not path.is_file():
        return
    longest = json.loads(path.read_text(encoding="utf-8")).get("max_position_embeddings")
    if isinstance(longest, int) and rollout.context_length > longest:
        raise SetupError(
            f"rollout.prompt_length={rollout.prompt_length} + rollout.response_length="
            f"{rollout.response_length} are {rollout.context_length} tokens, and the model in "
            f"{config.model.path} has a context of {longest}: lower one of the two"
        )
