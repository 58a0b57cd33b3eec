import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import uvicorn
import yaml
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from treadle.agent_loop import (
    AgentTask,
    Message,
    RewardError,
    Score,
    SetupError,
    StopReason,
    ToolCall,
    Trajectory,
)
from treadle.tools import rewards
from treadle.tools.rewards.judge.judge import Judge, JudgeError
from treadle.tools.rewards.judge.rubric import PLACEHOLDERS, fill, read_rubric
from treadle.tools.rewards.judge.verdicts import verdict

_CRITERION: Mapping[str, object] = {
    "name": "correct",
    "question": "Q: {question}\nA: {answer}\nTruth: {ground_truth}\n{{as is}}",
    "verdicts": {"yes": 1, "partly": 0.5, "no": 0},
}


class _Model:
    """An OpenAI-compatible server that follows a script: texts, or statuses for errors."""

    def __init__(self, *script: str | int) -> None:
        self.script = list(script)
        self.questions: list[str] = []
        self.requests: list[dict[str, object]] = []
        self.keys: list[str] = []
        self.running = self.most_running = 0
        self.hold: asyncio.Event | None = None
        self.arrived = asyncio.Event()

    async def answer(self, request: Request) -> Response:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.arrived.set()
        try:
            body = await request.json()
            self.requests.append(body)
            self.questions.append(body["messages"][-1]["content"])
            self.keys.append(request.headers["authorization"])
            if self.hold is not None:
                await self.hold.wait()
            said = self.script.pop(0)
        finally:
            self.running -= 1
        if isinstance(said, int):
            headers = {"retry-after-ms": "1"}
            return JSONResponse({"error": {"message": "sorry"}}, status_code=said, headers=headers)
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": said},
        }
        return JSONResponse(
            {
                "id": "1",
                "object": "chat.completion",
                "created": 0,
                "model": "m",
                "choices": [choice],
            }
        )

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        app = Starlette(routes=[Route("/v1/chat/completions", self.answer, methods=["POST"])])
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
        started = asyncio.Event()
        startup = server.startup

        async def start(sockets: object = None) -> None:
            await startup(sockets)  # type: ignore[arg-type]
            started.set()

        server.startup = start  # type: ignore[method-assign]
        serving = asyncio.create_task(server.serve())
        await started.wait()
        try:
            port = server.servers[0].sockets[0].getsockname()[1]
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.should_exit = True
            await serving


def _write(directory: Path, base_url: str, **settings: object) -> Path:
    path = directory / "rubric.yaml"
    document = {
        "model": {"base_url": base_url, "name": "m"},
        "criteria": [_CRITERION],
        **settings,
    }
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return path


def _trajectory(answer: str = "Paris") -> Trajectory:
    question = Message(role="user", content="Capital of {answer}?")
    call = ToolCall(id="1", name="atlas", arguments={"country": "France"})
    return Trajectory(
        task=AgentTask(
            task_id="train/7",
            sample_index=7,
            rollout_index=0,
            loop="single_turn_agent",
            messages=(question,),
            fields={"reward_model": {"ground_truth": "Paris"}},
        ),
        samples=(),
        messages=(
            question,
            Message(role="assistant", content="", tool_calls=(call,)),
            Message(role="tool", content="Paris, 2 M", tool_call_id="1", name="atlas"),
            Message(role="assistant", content=answer),
        ),
        stop=StopReason.FINISHED,
    )


async def _score(path: Path, *trajectories: Trajectory) -> list[Score]:
    async with Judge.from_file(path) as judge:
        return [await judge(trajectory) for trajectory in trajectories]


def _metrics(score: Score) -> dict[str, float]:
    return {metric.name: metric.value for metric in score.metrics}


@pytest.mark.asyncio
async def test_the_score_is_the_weighted_mean_and_the_judge_reads_question_answer_and_truth(
    tmp_path: Path,
) -> None:
    model = _Model("It is.\nVerdict: Yes", "**Verdict: bad**")
    short = {
        "name": "short",
        "question": "{transcript}",
        "verdicts": {"good": 2, "bad": -1},
        "weight": 3,
    }
    async with model.served() as url:
        path = _write(
            tmp_path,
            url,
            criteria=[_CRITERION, short],
            accuracy="correct",
            system="Be strict.",
            max_concurrency=1,
        )
        (score,) = await _score(path, _trajectory())
    assert score.value == pytest.approx((1 * 1 + 3 * -1) / 4)
    assert _metrics(score) == {
        "reward/judge_correct": 1.0,
        "reward/judge_short": -1.0,
        "reward/accuracy": 1.0,
        "reward/judge_calls": 2.0,
    }
    assert model.requests[0]["messages"][0] == {"role": "system", "content": "Be strict."}  # type: ignore[index]
    first, second = model.questions
    # What the texts hold is not read as a placeholder again.
    assert first.startswith("Q: Capital of {answer}?\nA: Paris\nTruth: Paris\n{as is}\n")
    assert first.endswith("Verdict: one of yes, partly, no")
    assert 'assistant: \n[calls atlas with {"country": "France"}]\n\ntool: Paris, 2 M' in second


@pytest.mark.asyncio
async def test_the_same_question_is_asked_once_also_by_a_later_run(tmp_path: Path) -> None:
    model = _Model("Verdict: yes", "Verdict: no")
    async with model.served() as url:
        path = _write(tmp_path, url, cache="verdicts.sqlite")
        first = await _score(path, _trajectory(), _trajectory())
        later = await _score(path, _trajectory(), _trajectory("Rome"))
    assert [score.value for score in (*first, *later)] == [1.0, 1.0, 1.0, 0.0]
    assert [_metrics(score)["reward/judge_calls"] for score in later] == [0.0, 1.0]
    assert len(model.questions) == 2


@pytest.mark.asyncio
async def test_equal_questions_at_once_are_one_question(tmp_path: Path) -> None:
    model = _Model("Verdict: yes", "Verdict: no")
    async with (
        model.served() as url,
        Judge.from_file(_write(tmp_path, url)) as judge,
    ):
        scores = await asyncio.gather(judge(_trajectory()), judge(_trajectory()))
    assert [score.value for score in scores] == [1.0, 1.0]
    assert [_metrics(score)["reward/judge_calls"] for score in scores] == [1.0, 0.0]
    assert len(model.questions) == 1


@pytest.mark.asyncio
async def test_runs_that_share_a_cache_get_the_verdict_that_was_kept_first(tmp_path: Path) -> None:
    model = _Model("Verdict: yes", "Verdict: no")
    model.hold = asyncio.Event()
    async with model.served() as url:
        path = _write(tmp_path, url, cache="verdicts.sqlite")
        async with Judge.from_file(path) as one, Judge.from_file(path) as other:
            asked = [asyncio.create_task(judge(_trajectory())) for judge in (one, other)]
            while model.running < 2:
                model.arrived.clear()
                await model.arrived.wait()
            model.hold.set()
            first, second = await asyncio.gather(*asked)
    assert first.value == second.value
    assert len(model.questions) == 2


@pytest.mark.asyncio
async def test_a_kept_judgement_that_is_no_verdict_any_more_is_replaced(tmp_path: Path) -> None:
    model = _Model("Verdict: yes", "Verdict: no")
    async with model.served() as url:
        path = _write(tmp_path, url, cache="verdicts.sqlite")
        await _score(path, _trajectory())
        with sqlite3.connect(tmp_path / "verdicts.sqlite") as database:
            database.execute("UPDATE judgements SET text = 'Verdict: perhaps'")
        scores = await _score(path, _trajectory(), _trajectory())
    assert [score.value for score in scores] == [0.0, 0.0]
    assert len(model.questions) == 2


@pytest.mark.asyncio
async def test_a_cache_that_fails_while_it_is_used_is_an_error_of_the_judge(tmp_path: Path) -> None:
    path = _write(tmp_path, "http://127.0.0.1:1/v1", cache="verdicts.sqlite")
    async with Judge.from_file(path) as judge:
        with sqlite3.connect(tmp_path / "verdicts.sqlite") as database:
            database.execute("DROP TABLE judgements")
        with pytest.raises(JudgeError, match=r"the judge's cache .*sqlite: no such table") as why:
            await judge(_trajectory())
    assert isinstance(why.value.__cause__, Exception)


@pytest.mark.asyncio
async def test_a_question_about_the_truth_needs_one(tmp_path: Path) -> None:
    without = replace(_trajectory(), task=replace(_trajectory().task, fields={"reward_model": {}}))
    model = _Model("Verdict: yes")
    async with model.served() as url:
        with pytest.raises(RewardError, match=r"task 'train/7': .*the row has no reward_model\.gr"):
            await _score(_write(tmp_path, url), without)
        assert model.questions == []
        blind = {**_CRITERION, "question": "Is {answer} polite? {{ground_truth}}"}
        (score,) = await _score(_write(tmp_path, url, criteria=[blind]), without)
    assert score.value == 1.0


@pytest.mark.asyncio
async def test_what_is_not_answered_and_what_is_no_verdict_share_one_budget(tmp_path: Path) -> None:
    model = _Model(503, "Verdict: maybe", "Verdict: maybe", "Verdict: yes")
    async with model.served() as url:
        with pytest.raises(JudgeError, match=r"2 answers of the judge do not end with one of"):
            await _score(_write(tmp_path, url, max_attempts=3), _trajectory())
        assert len(model.questions) == 3
        (score,) = await _score(_write(tmp_path, url, max_attempts=1), _trajectory())
        model.script = [503, 429, "Verdict: no"]
        (counted,) = await _score(_write(tmp_path, url, max_attempts=3), _trajectory("Rome"))
    assert (score.value, counted.value) == (1.0, 0.0)
    assert _metrics(counted)["reward/judge_calls"] == 3.0


@pytest.mark.asyncio
async def test_what_passes_is_tried_again_and_what_stays_is_an_error_and_no_score(
    tmp_path: Path,
) -> None:
    model = _Model(503, 429, "Verdict: partly")
    async with model.served() as url:
        (score,) = await _score(_write(tmp_path, url), _trajectory())
    assert score.value == 0.5

    model = _Model(503, 503)
    async with model.served() as url:
        with pytest.raises(JudgeError, match=r"criterion 'correct': the judge at http.*503") as why:
            await _score(_write(tmp_path, url, max_attempts=2), _trajectory())
        assert why.value.retryable
    with pytest.raises(JudgeError, match="APIConnectionError"):
        await _score(_write(tmp_path, url, max_attempts=1), _trajectory())


@pytest.mark.asyncio
async def test_an_answer_without_a_verdict_is_asked_again_and_is_never_kept(tmp_path: Path) -> None:
    model = _Model("Verdict: yes\nor not", "Verdict: maybe", "", "Verdict: yes")
    async with model.served() as url:
        path = _write(tmp_path, url, max_attempts=2, cache="verdicts.sqlite")
        with pytest.raises(JudgeError, match=r"2 answers .*yes, partly, no; .*'Verdict: maybe'"):
            await _score(path, _trajectory())
        (score,) = await _score(path, _trajectory())
    assert (score.value, _metrics(score)["reward/judge_calls"]) == (1.0, 2.0)


@pytest.mark.asyncio
async def test_the_number_of_questions_in_flight_is_bounded(tmp_path: Path) -> None:
    model = _Model(*["Verdict: yes"] * 6)
    model.hold = asyncio.Event()
    async with model.served() as url:
        path = _write(tmp_path, url, max_concurrency=2)
        async with Judge.from_file(path) as judge, asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(judge(_trajectory(str(number))))
            while model.running < 2:
                model.arrived.clear()
                await model.arrived.wait()
            model.hold.set()
    assert (model.most_running, len(model.questions)) == (2, 6)


@pytest.mark.asyncio
async def test_the_key_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _Model("Verdict: yes")
    async with model.served() as url:
        named = {"base_url": url, "name": "m", "api_key_variable": "THE_KEY"}
        path = _write(tmp_path, url, model=named)
        monkeypatch.delenv("THE_KEY", raising=False)
        with pytest.raises(SetupError, match=r"environment variable THE_KEY, which is not set"):
            rewards.resolve(str(path))
        monkeypatch.setenv("THE_KEY", "secret")
        await _score(path, _trajectory())
    assert model.keys == ["Bearer secret"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"criterion": []}, "unknown key 'criterion', did you mean 'criteria'"),
        ({"criteria": []}, "criteria must be a non-empty list"),
        (
            {"criteria": [{**_CRITERION, "question": "{answers}"}]},
            "'{answers}', did you mean 'answer'",
        ),
        ({"criteria": [{**_CRITERION, "question": "a } b"}]}, "write other braces twice"),
        ({"criteria": [{**_CRITERION, "verdicts": {True: 1, False: 0}}]}, 'write "yes", "no"'),
        ({"criteria": [{**_CRITERION, "verdicts": {"yes": 1}}]}, "at least two answers"),
        ({"criteria": [{**_CRITERION, "verdicts": {"a": 1, "b": "c"}}]}, "a score must be"),
        ({"criteria": [{**_CRITERION, "weight": 0}]}, "weight must be a number of at least"),
        (
            {"criteria": [{**_CRITERION, "weight": float("inf")}]},
            "weight must be a number of at least 1e-09, and finite, got inf",
        ),
        (
            {"criteria": [{**_CRITERION, "verdicts": {"Yes": 1, "yes": 0, "no": 0}}]},
            "'yes', which cannot be told from 'Yes'",
        ),
        (
            {"criteria": [{**_CRITERION, "verdicts": {"yes": 1, "**no**": 0, "no.": 0}}]},
            "'no.', which cannot be told from '**no**'",
        ),
        ({"criteria": [{**_CRITERION, "verdicts": {"**": 1, "no": 0}}]}, "'**' has no letter"),
        ({"criteria": [{**_CRITERION, "verdicts": {": a": 1, "b": 0}}]}, "': a' could not be read"),
        ({"criteria": [_CRITERION, _CRITERION]}, "two criteria have one name"),
        ({"accuracy": "correct_"}, "'correct_' is not a criterion, did you mean 'correct'"),
        ({"max_attempts": 0}, "max_attempts must be a whole number of at least 1, got 0"),
        ({"timeout_s": float("nan")}, "timeout_s must be a number"),
        ({"model": {"base_url": "http://x"}}, "model: name missing"),
        ({"model": {"servers": "a:1", "path": "m"}}, "servers must be a list of host:port"),
    ],
)
def test_an_invalid_rubric_is_refused_with_its_place(
    tmp_path: Path, settings: Mapping[str, object], why: str
) -> None:
    path = _write(tmp_path, "http://127.0.0.1:1/v1", **settings)
    with pytest.raises(SetupError) as refused:
        read_rubric(path)
    assert why in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_rubric_is_a_reward_by_its_path_and_takes_no_settings_of_others(tmp_path: Path) -> None:
    path = str(_write(tmp_path, "http://127.0.0.1:1/v1"))
    assert isinstance(rewards.resolve(path), Judge)
    with pytest.raises(SetupError, match=r"takes no mode=strict"):
        rewards.resolve(path, mode="strict")
    with pytest.raises(SetupError, match=r"cannot read the rubric or .*: No such file"):
        rewards.resolve(str(tmp_path / "other.yaml"))
    damaged = tmp_path / "damaged.sqlite"
    damaged.write_text("no database " * 100)
    with pytest.raises(SetupError, match=r"cannot use the judge's cache .*damaged.sqlite"):
        rewards.resolve(str(_write(tmp_path, "http://127.0.0.1:1/v1", cache="damaged.sqlite")))


@given(st.dictionaries(st.sampled_from(PLACEHOLDERS), st.text(), min_size=4), st.text())
def test_values_are_inserted_as_they_are(values: dict[str, str], around: str) -> None:
    doubled = around.replace("{", "{{").replace("}", "}}")
    question = doubled + "".join(f"{{{name}}}{doubled}" for name in PLACEHOLDERS)
    expected = around + "".join(values[name] + around for name in PLACEHOLDERS)
    assert fill(question, values) == expected


@given(st.text(), st.sampled_from(["yes", "not at all"]))
def test_only_the_last_line_is_a_verdict(before: str, label: str) -> None:
    labels = ("yes", "not at all")
    assert verdict(f"{before}\n *Verdict:  {label.upper()}.* \n", labels) == label
    assert verdict(f"Verdict: {label}\n{json.dumps(before)}", labels) is None


@pytest.mark.parametrize(
    "line",
    [
        "**Verdict:** yes",
        "Verdict: **yes**",
        "Verdict: `yes`",
        'Verdict: "yes"',
        "Verdict: \u201cYes\u201d.",
        "Verdict: [yes]",
        "__Verdict:__ _yes_",
        "## Verdict : *(Yes.)*",
    ],
)
def test_marks_around_a_verdict_do_not_matter(line: str) -> None:
    assert verdict(f"It is.\n{line}", ("no", "yes")) == "yes"


@given(
    st.sampled_from(["c", "c++", "c#", "a+", "<1", "50%", "\U0001f44d", "not at all", "f(x)"]),
    st.sampled_from(["", "*", "**", "_", "`", '"', "'"]),
)
def test_each_label_is_read_and_none_for_another(label: str, mark: str) -> None:
    labels = ("c", "c++", "c#", "a", "a+", "<1", ">1", "50%", "\U0001f44d", "not at all", "f(x)")
    assert verdict(f"Verdict: {mark}{label.upper()}{mark}", labels) == label
    assert verdict(f"Verdict: {mark}{label}-{mark}", labels) is None
