"""The rewards of this package: their names, modes and data sources, and what each reads.

Invariant: every reward reads a finished trajectory and its row's `reward_model.ground_truth`, and
nothing else; a row without one fails its trajectory with an error. All functions are pure.

| name | modes, the default first | from | `data_source` |
|---|---|---|---|
| gsm8k | strict, flexible, fixed | 0 to 1 | openai/gsm8k |
| math_dapo | minerva, boxed | -1 to 1 | math_dapo, aime* |
| retool | shaped, flat, capped | -1 to 1 | |
| geometry3k | verl | 0 to 1 | hiyouga/geometry3k |
| hotpotqa | em, f1 | 0 to 1 | hotpotqa/hotpot_qa, searchR1_* |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeVar, cast

from treadle.agent_loop import RewardError, Score, Trajectory
from treadle.tools.arguments import as_truth
from treadle.tools.rewards import gsm8k, hotpotqa, math_dapo, retool
from treadle.tools.rewards.boxed import last_boxed
from treadle.tracing import Metric

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedReward:
    """A reward of this package.

    Attributes:
        modes: Its ways of reading or scoring an answer, the default first.
        score: From the trajectory and a mode.
        timeout_s: Set where scoring may take any time: it then always has this limit, or the
            configuration's.
        needs: The library that it needs and the extra that installs it.
        prepare: Loads libraries outside the time limit.
        truth: Reads `reward_model.ground_truth` of a row's columns; raises `WrongTruthError`.
    """

    modes: tuple[str, ...]
    score: Callable[[Trajectory, str], Score]
    timeout_s: float | None = None
    needs: tuple[str, str] | None = None
    prepare: Callable[[], None] = lambda: None
    truth: Callable[[Mapping[str, object]], object] = lambda row: _text(row)


class WrongTruthError(ValueError):
    """A row's ground truth is missing, or of another form than its reward reads."""


def _gsm8k(trajectory: Trajectory, mode: str) -> Score:
    truth = _ground_truth(trajectory)
    text, read = trajectory.final_text, cast(gsm8k.Mode, mode)
    return Score(value=gsm8k.score(text, truth, mode=read), answer=gsm8k.extract(text, mode=read))


def _math_dapo(trajectory: Trajectory, mode: str) -> Score:
    truth = _ground_truth(trajectory)
    text, read = trajectory.final_text, cast(math_dapo.Mode, mode)
    value = math_dapo.score(text, truth, mode=read)
    answer = math_dapo.extract(text, mode=read)
    return Score(value=value, metrics=(_accuracy(value > 0),), answer=answer)


def _retool(trajectory: Trajectory, mode: str) -> Score:
    text, truth, turns = trajectory.final_text, _ground_truth(trajectory), trajectory.num_turns
    value = retool.score(text, truth, num_turns=turns, mode=cast(retool.Mode, mode))
    right = value > 0
    stalling = float(not right and turns >= retool.MANY_TURNS)
    return Score(
        value=value,
        metrics=(_accuracy(right), Metric("reward/wrong_with_many_turns", stalling)),
        answer=math_dapo.extract(text, mode="boxed"),
    )


def _geometry3k(trajectory: Trajectory, mode: str) -> Score:
    from treadle.tools.rewards import geometry3k

    text, truth = _with_reasoning(trajectory), _ground_truth(trajectory)
    right, formed = geometry3k.is_right(text, truth), geometry3k.has_form(text)
    return Score(
        value=geometry3k.weigh(right=right, formed=formed),
        metrics=(_accuracy(right), Metric("reward/format", float(formed))),
        answer=last_boxed(text),
    )


def _prepare_geometry3k() -> None:
    from treadle.tools.rewards import geometry3k

    geometry3k.prepare()


def _hotpotqa(trajectory: Trajectory, mode: str) -> Score:
    text, truths = trajectory.final_text, _ground_truths(trajectory)
    value = hotpotqa.score(text, truths, mode=cast(hotpotqa.Mode, mode))
    exact = hotpotqa.score(text, truths, mode="em") if mode != "em" else value
    answer = hotpotqa.extract(text)
    return Score(
        value=value,
        metrics=(_accuracy(exact > 0),),
        answer=None if answer is None else hotpotqa.normalise(answer),
    )


NAMED: Final[Mapping[str, NamedReward]] = MappingProxyType(
    {
        "geometry3k": NamedReward(
            modes=("verl",),
            score=_geometry3k,
            timeout_s=10.0,
            needs=("math_verify", "math"),
            prepare=_prepare_geometry3k,
        ),
        "gsm8k": NamedReward(modes=gsm8k.MODES, score=_gsm8k),
        "hotpotqa": NamedReward(
            modes=hotpotqa.MODES, score=_hotpotqa, truth=lambda row: _texts(row)
        ),
        "math_dapo": NamedReward(modes=math_dapo.MODES, score=_math_dapo),
        "retool": NamedReward(modes=retool.MODES, score=_retool),
    }
)
"""The rewards of this package, by the names that `reward.name` takes."""

_SOURCES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "hiyouga/geometry3k": "geometry3k",
        "hotpotqa/hotpot_qa": "hotpotqa",
        "math_dapo": "math_dapo",
        "openai/gsm8k": "gsm8k",
        "treadle/calculator": "gsm8k",
    }
)
# As in verl, every source that begins so: aime_2024, aime2025, searchR1_hotpotqa.
_SOURCE_PREFIXES: Final[Mapping[str, str]] = MappingProxyType(
    {"aime": "math_dapo", "searchR1_": "hotpotqa"}
)


def name_for_source(source: str) -> str | None:
    """Returns the reward of a row's `data_source`; None if there is none."""
    if source in _SOURCES:
        return _SOURCES[source]
    for prefix, name in _SOURCE_PREFIXES.items():
        if source.startswith(prefix):
            return name
    return None


def wrong_truth(name: str, row: Mapping[str, object]) -> str | None:
    """Returns why a reward of this package cannot score a row with these columns, else None.

    Rewards that are not of this package read what they like.
    """
    if name in NAMED:
        try:
            NAMED[name].truth(row)
        except WrongTruthError as error:
            return str(error)
    return None


def sources() -> tuple[str, ...]:
    """Returns the data sources that have a reward; a star stands for any ending."""
    return tuple(sorted((*_SOURCES, *(f"{prefix}*" for prefix in _SOURCE_PREFIXES))))


def _accuracy(right: bool) -> Metric:
    return Metric("reward/accuracy", float(right))


def _with_reasoning(trajectory: Trajectory) -> str:
    """Returns the last answer as the model wrote it, with reasoning that a parser separated."""
    last = trajectory.messages[-1]
    if last.role == "assistant" and last.reasoning:
        return f"<think>{last.reasoning}</think>{last.content}"
    return trajectory.final_text


def _ground_truth(trajectory: Trajectory) -> str:
    return _of_task(_text, trajectory)


def _ground_truths(trajectory: Trajectory) -> list[str]:
    return _of_task(_texts, trajectory)


def _of_task(read: Callable[[Mapping[str, object]], T], trajectory: Trajectory) -> T:
    try:
        return read(trajectory.task.fields)
    except WrongTruthError as error:
        raise RewardError(f"task {trajectory.task.task_id!r}: {error}") from None


def _text(row: Mapping[str, object]) -> str:
    truth = as_truth(_truth_of(row))
    if truth is None:
        raise WrongTruthError(_must_be("a string or an integer", _truth_of(row)))
    return truth


def _texts(row: Mapping[str, object]) -> list[str]:
    """Returns one accepted answer, several, or as Search-R1 writes them: {"target": [...]}."""
    truth = _truth_of(row)
    if isinstance(truth, Mapping):
        truth = truth.get("target")
    several = truth if isinstance(truth, list | tuple) else (truth,)
    texts = [text for each in several if (text := as_truth(each)) is not None]
    if not texts or len(texts) < len(several):
        raise WrongTruthError(_must_be("a string, a list of strings or {'target': ...}", truth))
    return texts


def _must_be(form: str, truth: object) -> str:
    """Returns what is wrong; without the value, so that rows with one mistake are one problem."""
    got = "no value" if truth is None else f"a value of type {type(truth).__name__}"
    return f"reward_model.ground_truth must be {form}, got {got}: write it as text"


def _truth_of(row: Mapping[str, object]) -> object:
    reward_model = row.get("reward_model")
    return reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
