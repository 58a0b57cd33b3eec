"""The sessions of an endpoint: authentication, and bounds on in-flight requests.

Invariant: a request is served only in an open session, with that session's own key, and only while
the session and the endpoint have a free slot. A request without a slot is refused at once with a
time to retry, never queued. Closing a session ends its requests and frees its slots.

Tasks that use the sessions share one event loop. `EndpointSession.complete` waits for the
generator.
"""

import asyncio
import enum
import hmac
import math
import secrets
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from treadle.agent_loop.aio import run_until
from treadle.agent_loop.capture import CapturedSession, CapturedTurn, LimitReachedError, TurnDelta
from treadle.agent_loop.errors import AgentLoopError, GenerationError, PromptTooLongError
from treadle.agent_loop.loops.loop import Services
from treadle.agent_loop.proxy.allowances import AgentConstraints, Allowances
from treadle.agent_loop.proxy.apis.common import AgentRequest
from treadle.agent_loop.proxy.call_constraint import call_constraint, frames_calls
from treadle.agent_loop.proxy.errors import ApiError, answer_to, bad_value, busy, unsupported
from treadle.agent_loop.trajectory import Trajectory
from treadle.agent_loop.types import JsonConstraint, Message, SamplingParams, StopReason
from treadle.tracing import Metric

T = TypeVar("T")


class AgentSampling(enum.StrEnum):
    """What to do with the temperature and top_p that an agent asks for."""

    REFUSE = "refuse"
    """Refuse values other than the run's, because the trainer computes log-probabilities with the
    run's."""
    RUN = "run"
    """Use the run's values instead. For agents whose parameters cannot be changed."""
    AGENT = "agent"
    """Use the agent's values. For evaluation."""


class EndpointSession:
    """The session of one trajectory at the endpoint.

    Args:
        services: Provides the renderer and the run's sampling parameters.
        constraints: The treatment of requests to constrain the sampling.
        max_in_flight: Maximum number of in-flight requests.
        key: The API key. None: a random one, for this session only.

    Attributes:
        id: Part of the address; random, so it reveals nothing about the task.
        reward: The last reward that the agent posted; None if there is none.
        failure: Why the servers failed the last request; None if they did not.
        refused: The limit that forbade the last request; None if it was allowed.
        allowed: Problems that were let pass in the requests so far.
        answered: The conversations that a request may continue by the id of their last answer.
    """

    def __init__(
        self,
        captured: CapturedSession,
        services: Services,
        *,
        sampling: AgentSampling,
        constraints: AgentConstraints = AgentConstraints.REFUSE,
        max_in_flight: int,
        key: str | None = None,
    ) -> None:
        self.captured = captured
        self.renderer = services.renderer
        self.id = secrets.token_hex(8)
        self.key = secrets.token_urlsafe(24) if key is None else key
        self.reward: float | None = None
        self.failure: GenerationError | None = None
        self.refused: LimitReachedError | None = None
        enforce = constraints is AgentConstraints.ENFORCE
        self.allowed = Allowances(
            constraints, calls_enforced=enforce and frames_calls(services.renderer)
        )
        self.answered: dict[str, tuple[Message, ...]] = {}
        self._base = services.sampling
        self._sampling = sampling
        self._max_in_flight = max_in_flight
        self._closed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._in_flight = 0
        self._num_answers = 0

    def next_answer(self) -> int:
        """Returns the number of the next answer, from 0; unique in the session."""
        self._num_answers += 1
        return self._num_answers - 1

    async def complete(
        self,
        request: AgentRequest,
        *,
        gone: Callable[[], Coroutine[Any, Any, object]],
        on_delta: Callable[[int, TurnDelta], None] | None = None,
    ) -> tuple[CapturedTurn, ...] | None:
        """Samples the answers to a request.

        Args:
            gone: Returns when the agent no longer waits for the answer.

        Returns:
            The turns, or None if the agent disconnected or the session was closed before.

        Raises:
            ApiError: The answers could not be sampled.
        """
        if request.n > self._max_in_flight:
            raise bad_value("n", f"it is {request.n}; this session has {self._max_in_flight} slots")
        params = self._params(request)
        if request.response_schema is not None:
            params = replace(params, constraint=JsonConstraint(schema=request.response_schema))
        if request.calls:
            constraint = call_constraint(request.tools, request.calls, self.renderer)
            params = replace(params, constraint=constraint)
        if request.prompt_ids:
            stops = (*params.stop_token_ids, *request.stop_token_ids)
            turns = self.captured.continue_ids(
                request.prompt_ids,
                n=request.n,
                max_tokens=request.max_tokens,
                sampling=replace(params, stop_token_ids=tuple(dict.fromkeys(stops))),
                seed=request.seed,
                stop=request.stop,
            )
        else:
            turns = self.captured.choices(
                request.messages,
                n=request.n,
                tools=request.tools,
                max_tokens=request.max_tokens,
                sampling=params,
                seed=request.seed,
                stop=request.stop,
                on_delta=on_delta,
            )
        try:
            captured = await run_until(turns, gone, self._closed.wait)
        except LimitReachedError as error:
            self.refused = error
            raise answer_to(error) from error
        except AgentLoopError as error:
            too_long = isinstance(error, PromptTooLongError)
            if isinstance(error, GenerationError) and not too_long:
                self.failure = error
            raise answer_to(error) from error
        if captured is not None:
            self.failure = self.refused = None
        return captured

    def record(
        self,
        answer_id: str,
        request: AgentRequest,
        turns: Sequence[CapturedTurn],
        allowed: Allowances,
    ) -> None:
        """Keeps what an answered request was let pass, and its conversation if it is stored."""
        self.allowed.add(allowed)
        if request.store:
            history = request.messages[request.num_instructions :]
            self.answered[answer_id] = (*history, turns[0].parsed.message)

    def finish(
        self,
        stop: StopReason | None = None,
        *,
        reward: float | None = None,
        metrics: Sequence[Metric] = (),
    ) -> Trajectory:
        """Freezes the trajectory, with what was let pass; see `CapturedSession.finish`."""
        trajectory = self.captured.finish(
            stop, reward=reward, metrics=(*self.allowed.metrics(), *metrics)
        )
        findings = (*trajectory.findings, *self.allowed.findings())
        return replace(trajectory, findings=findings)

    async def while_open(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs work, and cancels it if the session is closed.

        Raises:
            ApiError: The session was closed.
        """
        result = await run_until(work, self._closed.wait)
        if result is None:
            raise _not_found(self.id)
        return result

    async def close(self) -> None:
        """Cancels the in-flight requests and waits until they have ended."""
        self._closed.set()
        await self._idle.wait()

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Takes a slot for a request, before its body is read; `close` waits for the request.

        Raises:
            ApiError: No slot is free.
        """
        if self._in_flight >= self._max_in_flight:
            raise busy(f"this session has {self._in_flight} requests in flight, which is its limit")
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    def _params(self, request: AgentRequest) -> SamplingParams:
        base = self._base
        if self._sampling is AgentSampling.AGENT:
            temperature = base.temperature if request.temperature is None else request.temperature
            top_p = base.top_p if request.top_p is None else request.top_p
            return replace(base, temperature=temperature, top_p=top_p)
        if self._sampling is AgentSampling.REFUSE:
            _check_same("temperature", request.temperature, base.temperature)
            _check_same("top_p", request.top_p, base.top_p)
        return base


class EndpointSessions:
    """The open sessions of an endpoint.

    Args:
        max_in_flight: Maximum number of in-flight requests over all sessions.
    """

    def __init__(self, *, max_in_flight: int) -> None:
        self._sessions: dict[str, EndpointSession] = {}
        self._max_in_flight = max_in_flight
        self._in_flight = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session: EndpointSession) -> None:
        """Opens a session."""
        self._sessions[session.id] = session

    async def remove(self, session: EndpointSession) -> None:
        """Closes a session: cancels its requests and refuses further ones."""
        self._sessions.pop(session.id, None)
        await session.close()

    def find(self, session_id: str, authorization: str, api_key: str = "") -> EndpointSession:
        """Returns the session of a request.

        Args:
            authorization: The header; "Bearer" and the session's key.
            api_key: The header `x-api-key`, in which Anthropic's clients send it.

        Raises:
            ApiError: There is no such session, or the key is not its own.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise _not_found(session_id)
        scheme, _, key = authorization.partition(" ")
        given = [api_key, key] if scheme.lower() == "bearer" else [api_key]
        if not any(hmac.compare_digest(k.strip().encode(), session.key.encode()) for k in given):
            raise ApiError(
                "the API key is not this session's; it is in OPENAI_API_KEY of the agent",
                status=401,
                code="invalid_api_key",
            )
        return session

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Takes a slot of the endpoint for a request.

        Raises:
            ApiError: No slot is free.
        """
        if self._in_flight >= self._max_in_flight:
            raise busy(f"{self._in_flight} requests are in flight here, which is the limit")
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1


def _not_found(session_id: str) -> ApiError:
    return ApiError(
        f"there is no session {session_id[:32]!r}: it was never opened, or is over",
        status=404,
        code="session_not_found",
    )


def read_reward(data: object) -> float:
    """Parses {"reward": number}.

    Raises:
        ApiError: The data is something else.
    """
    reward = data.get("reward") if isinstance(data, dict) and data.keys() == {"reward"} else None
    if isinstance(reward, int | float) and not isinstance(reward, bool):
        with suppress(OverflowError):  # integers are unbounded
            if math.isfinite(reward):
                return float(reward)
    raise bad_value("reward", 'the body must be {"reward": a finite number}')


def _check_same(name: str, asked: float | None, run: float | None) -> None:
    default = 1.0 if run is None else run
    if asked is not None and asked != default:
        raise unsupported(
            name,
            f"it is {asked:g}, but the run samples with {default:g}, and its trainer assumes "
            f"that; leave it out, set it to {default:g}, or run the loop with "
            "AgentSampling.RUN (the run's is used) or AGENT (the agent's is used)",
        )
