"""Loads what a run or an evaluation reads besides its rows: the reward and the tokenizer.

A fault of the user's files is an error that names the file. Takes seconds; the caller chooses the
thread.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from treadle.agent_loop import RewardFn, SetupError
from treadle.tools import rewards
from treadle.tools.rewards.judge import Judge
from treadle.trainer.config.schema import Config, RewardConfig
from treadle.trainer.config.sft import AnyConfig
from treadle.trainer.data import Prompt, PromptRules, Row, check_each
from treadle.trainer.data.own_reader import imports_verl
from treadle.trainer.own_code import NOTHING, OwnCode

if TYPE_CHECKING:
    from treadle.agent_loop.hf import HfRenderer

__all__ = [
    "Inputs",
    "check_context",
    "check_ground_truth",
    "enter_reward",
    "load_renderer",
    "load_reward",
    "model_context",
    "read_model_config",
]

_VERL_REWARDS: Final = (
    "verl is not needed here, and its rewards are built in. Leave the custom function out: a row's "
    "data_source then chooses its reward, and reward.name=retool is that of recipe/retool. A "
    "function of your own with verl's arguments goes to a file that does not import verl"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The user's files, read and checked; `notes` are lines to print at start.

    `loops` names the loops that run the rows; `images` is true if any prompt has an image. An
    evaluation has no training rows.
    """

    renderer: "HfRenderer"
    rules: PromptRules
    reward: RewardFn
    train: Sequence[Prompt]
    val: Sequence[Prompt]
    loops: frozenset[str]
    notes: tuple[str, ...]
    images: bool = False


def load_reward(
    config: Config, rows: Iterable[Row], own: OwnCode = NOTHING, *, rules: PromptRules | None
) -> RewardFn:
    """Returns the reward of a run.

    Args:
        rows: All rows of the run.
        own: The user's objects beside the configuration.
        rules: Has the loops that score their trajectories; None if they could not be loaded, which
            is reported separately.

    Raises:
        SetupError: It does not exist or does not load, or no reward is known for a row's
            `data_source`, or one is given and the loops of all rows score, or of some rows where it
            compares groups.
    """
    settings = config.reward
    sources = {
        None if _is_scored(row, rules) else str(row.columns.get("data_source")) for row in rows
    }
    given = f"reward.name={settings.name}" if own.reward is None else f"reward={own.reward!r}"
    if sources == {None} and (settings.names or own.reward is not None):
        raise SetupError(
            f"{given} would score nothing, because the agent loops or the tools of all rows score "
            "their trajectories (scores_itself, a method reward): leave the reward out, or use "
            "those that do not"
        )
    reward = own.reward or _configured(settings)
    if isinstance(reward, rewards.WeightedRewards) and reward.compares:
        if None in sources:
            raise SetupError(
                f"{given} compares the trajectories of a group, and the agent loops or the tools "
                "of some rows score theirs themselves: give all rows loops that do not"
            )
        if config.algorithm.advantage == "remax":
            raise SetupError(
                f"{given} compares the trajectories of a group, and algorithm.advantage=remax "
                "scores a greedy one alone: choose another estimator, such as grpo"
            )
    if own.reward is None and not settings.names:
        rewards.check_data_sources(sources - {None}, mode=settings.mode)
    return reward


def _configured(settings: RewardConfig) -> RewardFn:
    try:
        return rewards.resolve_all(
            settings.names,
            weights=settings.weights,
            mode=settings.mode,
            timeout_s=settings.timeout_s,
            timeout_score=settings.timeout_score,
        )
    except SetupError as error:
        if any(imports_verl(name) for name in settings.names):
            raise SetupError(f"{error}: {_VERL_REWARDS}") from error.__cause__
        raise


def _is_scored(row: Row, rules: PromptRules | None) -> bool:
    """Returns whether a row's loop scores it; false where the loop does not load."""
    try:
        return rules is not None and rules.scored_by_loop(row)
    except SetupError:
        return False


async def enter_reward(stack: AsyncExitStack, reward: RewardFn) -> None:
    """Opens a reward that has something to open, such as a judge's connections.

    Raises:
        SetupError: A judge's servers do not answer.
    """
    if isinstance(reward, AbstractAsyncContextManager):
        await stack.enter_async_context(reward)


def check_ground_truth(
    config: Config,
    rows: Sequence[Row],
    reward: RewardFn | None,
    rules: PromptRules | None,
    *,
    split: str,
) -> None:
    """Rejects rows that lack what their reward reads: its ground truth, or your function's columns.

    Args:
        reward: The loaded reward; None if it could not be loaded, which is another problem.
        split: Names the rows in messages: "train" or "val".

    Raises:
        DataError: There is one such row, or several with one problem.
        SeveralProblems: There are several problems.
    """
    functions = tuple(rewards.user_functions(reward).values())
    parts = reward.parts.values() if isinstance(reward, rewards.WeightedRewards) else (reward,)
    judges = [part for part in parts if isinstance(part, Judge)]

    def problem(row: Row) -> str | None:
        if _is_scored(row, rules):
            return None
        names = config.reward.names
        if not names and not functions:
            names = (rewards.name_for_source(str(row.columns.get("data_source"))) or "",)
        for name in names:
            if (found := rewards.wrong_truth(name, row.columns)) is not None:
                return f"{found}, for the reward {name}"
        for judge in judges:
            if (found := judge.wrong_truth(row.columns)) is not None:
                return f"{found}, for the reward {config.reward.name}"
        try:
            for function in functions:
                function.check_row(row.columns)
        except SetupError as error:
            return str(error)
        return None

    check_each(rows, split=split, problem=problem)


def load_renderer(config: AnyConfig) -> "HfRenderer":
    """Returns the model's chat format.

    Args:
        config: The run's configuration; `model.path` is a directory.

    Raises:
        SetupError: The tokenizer does not load, or its chat template cannot be used.
    """
    from treadle.agent_loop.hf import HfRenderer
    from treadle.agent_loop.parsers import UnclosedReasoning

    # Fine-tuning runs no calls, so it has no rule for them.
    rule = getattr(config.agent, "unclosed_reasoning", UnclosedReasoning.CALL)
    return HfRenderer.from_directory(
        config.model.path,
        parser=config.agent.parser,
        template_kwargs=config.agent.template_kwargs,
        unclosed=UnclosedReasoning(rule),
    )


def check_context(config: Config) -> None:
    """Rejects lengths beyond the model's context.

    Args:
        config: The run's configuration; `model.path` is a directory.

    Raises:
        SetupError: A trajectory may outgrow the model, or its config.json cannot be read.
    """
    rollout, folder = config.rollout, config.model.path
    longest = model_context(folder)
    if longest is not None and rollout.context_length > longest:
        raise SetupError(
            f"rollout.prompt_length={rollout.prompt_length} + rollout.response_length="
            f"{rollout.response_length} are {rollout.context_length} tokens, and the model in "
            f"{folder} has a context of {longest}: lower one of the two"
        )


def model_context(folder: Path) -> int | None:
    """Returns the context of a model directory in tokens, None if its config.json does not say.

    Raises:
        SetupError: It cannot be read.
    """
    settings = read_model_config(folder)
    of_text = settings.get("text_config")  # of a model that sees
    if isinstance(of_text, dict):
        settings = {**settings, **of_text}
    longest = settings.get("max_position_embeddings")
    return longest if isinstance(longest, int) else None


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
