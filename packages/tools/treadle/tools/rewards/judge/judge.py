"""The reward by a judge: each criterion is one question, the score their weighted mean.

Invariants:

1. A judge that cannot be reached, or does not come to a verdict, gives no score: the trajectory
   fails with a `JudgeError`, which names the judge, and may be attempted again. An error is never
   a low reward.
2. Only the judge's own text is searched for a verdict, and only its last line counts.
3. At most `max_concurrency` questions are in flight, and no two that are equal: the second waits
   for the first, and gets its verdict.

The weighted mean is the explicit aggregation of "Rubrics as Rewards" (arXiv:2507.17746), section 3:
the sum of weight x score, divided by the sum of the weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from weakref import WeakValueDictionary

from treadle.agent_loop import Message, RewardError, Score, Trajectory
from treadle.tools.rewards.judge.cache import CacheError, JudgementCache
from treadle.tools.rewards.judge.models import JudgeModel, ModelError, model_of
from treadle.tools.rewards.judge.rubric import (
    Criterion,
    OpenAiAddress,
    Rubric,
    fill,
    read_rubric,
)
from treadle.tools.rewards.judge.verdicts import verdict
from treadle.tracing import Metric, Reduce

__all__ = ["Judge", "JudgeError"]


class JudgeError(RewardError):
    """The judge did not judge; the answer is not to blame."""

    retryable = True


class Judge:
    """A `RewardFn` that asks a language model. An async context manager: entered, then called.

    Raises:
        SetupError: The cache cannot be used.
    """

    def __init__(self, rubric: Rubric, model: JudgeModel) -> None:
        self._rubric = rubric
        self._model = model
        self._cache = JudgementCache(rubric.cache)
        self._slots = asyncio.Semaphore(rubric.max_concurrency)
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Returns the judge that a rubric file describes.

        Raises:
            SetupError: The file is invalid, or something that it names is missing.
        """
        rubric = read_rubric(path)
        return cls(rubric, model_of(rubric))

    async def __aenter__(self) -> Self:
        await self._model.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._model.__aexit__(*error)
        self._cache.close()

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Scores a trajectory.

        Raises:
            JudgeError: A question got no verdict, or the cache cannot be used.
            RewardError: A question holds the ground truth, and the row has none.
        """
        if why := self.wrong_truth(trajectory.task.fields):
            raise RewardError(f"task {trajectory.task.task_id!r}: {why}")
        values = _values(trajectory)
        criteria = self._rubric.criteria
        failed: Exception | None = None
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._judge(each, values)) for each in criteria]
        except ExceptionGroup as errors:
            failed = errors.exceptions[0]
        if failed is not None:
            raise failed  # here, not above: it keeps its own cause
        judged = [task.result() for task in tasks]
        total = sum(criterion.weight for criterion in criteria)
        value = sum(c.weight * c.verdicts[j.label] for c, j in zip(criteria, judged, strict=True))
        metrics = [
            Metric(f"reward/judge_{criterion.name}", criterion.verdicts[each.label])
            for criterion, each in zip(criteria, judged, strict=True)
        ]
        for criterion, each in zip(criteria, judged, strict=True):
            if criterion.name == self._rubric.accuracy:
                best = max(criterion.verdicts.values())
                right = criterion.verdicts[each.label] == best
                metrics.append(Metric("reward/accuracy", float(right)))
        asked = sum(each.asked for each in judged)
        metrics.append(Metric("reward/judge_calls", asked, Reduce.SUM))
        return Score(value=value / total, metrics=tuple(metrics))

    def wrong_truth(self, row: Mapping[str, object]) -> str | None:
        """Returns why a row with these columns cannot be judged, else None."""
        if not self._rubric.reads_truth or _truth(row) is not None:
            return None
        return (
            "a question of the rubric holds {ground_truth}, and the row has no "
            "reward_model.ground_truth: add it to the row, or take it out of the question"
        )

    async def _judge(self, criterion: Criterion, values: Mapping[str, str]) -> _Judgement:
        """Returns the verdict on one criterion, from the cache or the model."""
        question = f"{fill(criterion.question, values)}\n\n{_ending(criterion)}"
        key = self._key(question)
        try:
            # The equal question before this one first: then its verdict is in the cache.
            async with self._asking.setdefault(key, asyncio.Lock()), self._slots:
                return await self._ask(criterion, question, key)
        except (ModelError, CacheError) as error:
            raise JudgeError(f"criterion {criterion.name!r}: {error}") from error

    async def _ask(self, criterion: Criterion, question: str, key: str) -> _Judgement:
        labels = tuple(criterion.verdicts)
        kept = await asyncio.to_thread(self._cache.get, key)
        label = None if kept is None else verdict(kept, labels)
        if label is not None:
            return _Judgement(label=label, asked=0)
        asked, answers, most = 0, 0, self._rubric.max_attempts
        text = ""
        while asked < most:
            answer = await self._model.ask(question, max_requests=most - asked)
            text, asked, answers = answer.text, asked + answer.requests, answers + 1
            label = verdict(text, labels)
            if label is not None:
                # Another process may have kept its judgement meanwhile, which then counts.
                kept = await asyncio.to_thread(self._cache.put, key, text, instead_of=kept)
                return _Judgement(label=verdict(kept, labels) or label, asked=asked)
        raise JudgeError(
            f"criterion {criterion.name!r}: {answers} answers of the judge do not end with one of "
            f"the verdicts {', '.join(labels)}; the last one ends with {text[-80:]!r}. Raise "
            "max_tokens if it was cut, or say more in the question"
        )

    def _key(self, question: str) -> str:
        rubric = self._rubric
        # Not the address: the same model may be served elsewhere tomorrow.
        name = rubric.model.name if isinstance(rubric.model, OpenAiAddress) else rubric.model.path
        decides = [str(name), rubric.system, rubric.temperature, rubric.max_tokens, question]
        return hashlib.sha256(json.dumps(decides).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judgement:
    """A verdict and the number of requests that it took."""

    label: str
    asked: int


def _ending(criterion: Criterion) -> str:
    return (
        "Give your reasons in a few sentences. Then end with one line of this form, and write "
        f"nothing after it:\nVerdict: one of {', '.join(criterion.verdicts)}"
    )


def _values(trajectory: Trajectory) -> Mapping[str, str]:
    truth = _truth(trajectory.task.fields)
    asked = [m.content for m in trajectory.task.messages if m.role == "user"]
    return {
        "question": asked[-1] if asked else "",
        "answer": trajectory.final_text,
        "ground_truth": truth if isinstance(truth, str) else json.dumps(truth, default=str),
        "transcript": "\n\n".join(map(_as_text, trajectory.messages)),
    }


def _truth(row: Mapping[str, object]) -> object:
    reward_model = row.get("reward_model")
    return reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None


def _as_text(message: Message) -> str:
    calls = "".join(
        f"\n[calls {call.name} with {json.dumps(call.arguments, default=str)}]"
        for call in message.tool_calls
    )
    return f"{message.role}: {message.content}{calls}"
