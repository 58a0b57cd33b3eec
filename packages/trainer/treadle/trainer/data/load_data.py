"""Loads the inputs of a run: rows, tokenizer and reward, checked before the first step.

Invariant: training can start with what `prepare` returns. Every fault of the user's files is an
error here that names file and row. Takes seconds; the caller chooses the thread.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.agent_loop import RewardFn, SetupError
from treadle.tools import rewards
from treadle.trainer.config.schema import Config
from treadle.trainer.data import Prompt, PromptRules, Row, check_each, make_prompts, read_rows
from treadle.trainer.own_code import NOTHING, OwnCode

if TYPE_CHECKING:
    from treadle.agent_loop.hf import HfRenderer

__all__ = [
    "Inputs",
    "Rows",
    "check_context",
    "check_ground_truth",
    "load_renderer",
    "load_reward",
    "prepare",
    "read_all_rows",
    "read_model_config",
]


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
        config: The run's configuration; `model.path` is a directory.
        rows: As `read_all_rows` gives them; a split may be empty.
        rules: What the rows may ask for.
        own: The user's objects beside the configuration.

    Raises:
        SetupError: The model's context is too short, or the tokenizer or the reward cannot be
            used.
        DataError: A row cannot be used.
    """
    check_context(config)
    reward = load_reward(config, [*rows.train, *rows.val], own)
    renderer = load_renderer(config)
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


def load_reward(config: Config, rows: Iterable[Row], own: OwnCode = NOTHING) -> RewardFn:
    """Returns the reward of a run.

    Args:
        config: The run's configuration.
        rows: All rows that it will score.
        own: The user's objects beside the configuration.

    Raises:
        SetupError: It does not exist or does not load, or no reward is known for a row's
            `data_source`.
    """
    if own.reward is not None:
        return own.reward
    settings = config.reward
    reward = rewards.resolve(
        settings.name,
        mode=settings.mode,
        timeout_s=settings.timeout_s,
        timeout_score=settings.timeout_score,
    )
    if settings.name is None:
        sources = (row.columns.get("data_source") for row in rows)
        rewards.check_data_sources(sources, mode=settings.mode)
    return reward


def check_ground_truth(config: Config, rows: Sequence[Row], *, split: str) -> None:
    """Rejects rows whose ground truth their reward of treadle.tools could not read.

    Raises:
        DataError: There is one such row, or several with one problem.
        SeveralProblems: There are several problems.
    """

    def problem(row: Row) -> str | None:
        name = config.reward.name or rewards.name_for_source(str(row.columns.get("data_source")))
        found = None if name is None else rewards.wrong_truth(name, row.columns)
        return None if found is None else f"{found}, for the reward {name}"

    check_each(rows, split=split, problem=problem)


def load_renderer(config: Config) -> "HfRenderer":
    """Returns the model's chat format.

    Args:
        config: The run's configuration; `model.path` is a directory.

    Raises:
        SetupError: The tokenizer does not load, or its chat template cannot be used.
    """
    from treadle.agent_loop.hf import HfRenderer

    return HfRenderer.from_directory(
        config.model.path,
        parser=config.agent.parser,
        template_kwargs=config.agent.template_kwargs,
    )


def check_context(config: Config) -> None:
    """Rejects lengths beyond the model's context.

    Args:
        config: The run's configuration; `model.path` is a directory.

    Raises:
        SetupError: A trajectory may outgrow the model, or its config.json cannot be read.
    """
    rollout, folder = config.rollout, config.model.path
    longest = read_model_config(folder).get("max_position_embeddings")
    if isinstance(longest, int) and rollout.context_length > longest:
        raise SetupError(
            f"rollout.prompt_length={rollout.prompt_length} + rollout.response_length="
            f"{rollout.response_length} are {rollout.context_length} tokens, and the model in "
            f"{folder} has a context of {longest}: lower one of the two"
        )


def read_model_config(folder: Path) -> Mapping[str, Any]:
    """Returns what config.json of a model directory says.

    Raises:
        SetupError: It cannot be read.
    """
    file = folder / "config.json"
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SetupError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise SetupError(f"{file} holds {value!r:.80}; it must be a JSON object")
    return value
