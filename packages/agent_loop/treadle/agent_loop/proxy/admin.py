"""Session management over HTTP: a program in any language opens sessions and gets trajectories.

    POST   /sessions                {"task_id": "row-0", ...}  -> {"id", "base_url", "api_key", ...}
    POST   /sessions/<id>/finish    {"reward": 1.0}            -> the trajectory
    DELETE /sessions/<id>                                      discards its trajectory

Invariant: these routes require the endpoint's own key, never a session's. Every session ends: it is
finished, deleted, or discarded when it is `deadline_s` old, which cancels its requests.

Requests are tasks of the HTTP server. The task that runs `deadlines` waits for the oldest session.
"""

import asyncio
import hmac
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from treadle.agent_loop.capture import CapturedSession
from treadle.agent_loop.errors import GenerationError, LoopError
from treadle.agent_loop.loops.loop import Services
from treadle.agent_loop.proxy.allowances import AgentConstraints
from treadle.agent_loop.proxy.body import SMALL, Bodies
from treadle.agent_loop.proxy.errors import ApiError, answer_to, bad_value, busy, unsupported
from treadle.agent_loop.proxy.messages import read_object, written_message
from treadle.agent_loop.proxy.sessions import (
    AgentSampling,
    EndpointSession,
    EndpointSessions,
    read_reward,
)
from treadle.agent_loop.trajectory import Trajectory
from treadle.agent_loop.types import AgentTask, Message

_LOOP = "proxy"
_TOGETHER = 64


@dataclass(slots=True, kw_only=True)
class _Open:
    session: EndpointSession
    captured: CapturedSession
    deadline: float


class SessionAdmin:
    """Opens and closes sessions.

    Args:
        sessions: The open sessions of the endpoint.
        services: Provides generator, renderer, limits and sampling.
        constraints: The treatment of requests to constrain the sampling.
        deadline_s: Seconds after which a session is discarded.
        max_sessions: Maximum number of open sessions.
        max_session_requests: Maximum number of in-flight requests per session.

    Attributes:
        routes: Routes to add to the endpoint.
    """

    def __init__(
        self,
        sessions: EndpointSessions,
        services: Services,
        *,
        key: str,
        sampling: AgentSampling,
        constraints: AgentConstraints,
        deadline_s: float,
        max_sessions: int,
        max_session_requests: int,
    ) -> None:
        self._sessions = sessions
        self._services = services
        self._key = key
        self._sampling = sampling
        self._constraints = constraints
        self._deadline_s = deadline_s
        self._max_sessions = max_sessions
        self._max_session_requests = max_session_requests
        self._open: dict[str, _Open] = {}
        self._changed = asyncio.Event()
        self._bodies = Bodies(_TOGETHER * SMALL)
        self.routes = [
            Route("/sessions", self._create, methods=["POST"]),
            Route("/sessions/{session_id}/finish", self._finish, methods=["POST"]),
            Route("/sessions/{session_id}", self._delete, methods=["DELETE"]),
        ]

    async def deadlines(self) -> None:
        """Discards sessions that are too old. Runs until it is cancelled, then ends all."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._changed.clear()
                oldest = next(iter(self._open.values()), None)
                when = None if oldest is None else max(0.0, oldest.deadline - loop.time())
                try:
                    async with asyncio.timeout(when):
                        await self._changed.wait()
                except TimeoutError:
                    assert oldest is not None
                    await self._end(oldest)
        finally:
            for session in list(self._open.values()):
                await self._end(session)

    async def _create(self, request: Request) -> Response:
        self._check_key(request)
        task = _read_task(read_object(await self._bodies.read(request, max_bytes=SMALL)))
        if len(self._open) >= self._max_sessions:
            raise busy(f"{len(self._open)} sessions are open, which is the limit")
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        services = replace(self._services, deadline=deadline)
        captured = CapturedSession(task, services)
        session = EndpointSession(
            captured,
            services,
            sampling=self._sampling,
            constraints=self._constraints,
            max_in_flight=self._max_session_requests,
        )
        self._open[session.id] = _Open(session=session, captured=captured, deadline=deadline)
        self._sessions.add(session)
        self._changed.set()
        address = f"{request.base_url}sessions/{session.id}"
        return JSONResponse(
            {
                "id": session.id,
                "base_url": f"{address}/v1",
                "reward_url": f"{address}/reward",
                "api_key": session.key,
                "deadline_s": self._deadline_s,
            },
            status_code=201,
        )

    async def _finish(self, request: Request) -> Response:
        opened = self._find(request)
        reward = opened.session.reward
        if body := await self._bodies.read(request, max_bytes=SMALL):
            reward = read_reward(read_object(body))
        self._find(request)  # again, because a concurrent call may have finished the session
        await self._end(opened)
        try:
            if opened.session.failure is not None:
                raise opened.session.failure
            trajectory = opened.session.finish(reward=reward)
        except LoopError as error:
            raise ApiError(str(error), status=409, code="no_completion") from error
        except GenerationError as error:
            raise answer_to(error) from error
        return JSONResponse(written_trajectory(trajectory))

    async def _delete(self, request: Request) -> Response:
        await self._end(self._find(request))
        return Response(status_code=204)

    async def _end(self, opened: _Open) -> None:
        self._open.pop(opened.session.id, None)
        self._changed.set()
        await self._sessions.remove(opened.session)
        opened.captured.close()

    def _find(self, request: Request) -> _Open:
        self._check_key(request)
        opened = self._open.get(request.path_params["session_id"])
        if opened is None:
            raise ApiError(
                "there is no such session: it was never opened, or is over",
                status=404,
                code="session_not_found",
            )
        return opened

    def _check_key(self, request: Request) -> None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(
            key.strip().encode(), self._key.encode()
        ):
            raise ApiError(
                "sessions are opened and finished with the endpoint's own key",
                status=401,
                code="invalid_api_key",
            )


def written_trajectory(trajectory: Trajectory) -> dict[str, object]:
    """Returns a trajectory as JSON; ids, mask and log-probabilities of each sample are [L]."""
    return {
        "task_id": trajectory.task.task_id,
        "rollout_index": trajectory.task.rollout_index,
        "stop": trajectory.stop.value,
        "reward": trajectory.reward,
        "messages": [written_message(message) for message in trajectory.messages],
        "samples": [
            {
                "ids": list(sample.ids),
                "loss_mask": list(sample.loss_mask),
                "logprobs": list(sample.logprobs),
                "spans": [
                    {
                        "origin": span.origin.value,
                        "start": span.start,
                        "stop": span.stop,
                        "weight_version": span.weight_version,
                    }
                    for span in sample.spans
                ],
            }
            for sample in trajectory.samples
        ],
        "findings": [{"kind": f.kind, "text": f.text} for f in trajectory.findings],
        "metrics": {metric.name: metric.value for metric in trajectory.metrics},
    }


def _read_task(data: dict[str, object]) -> AgentTask:
    known = {"task_id": None, "rollout_index": 0, "seed": None}
    if unknown := sorted(data.keys() - known.keys()):
        raise unsupported(unknown[0], f"unknown field; the fields are {', '.join(known)}")
    given = {**known, **data}
    task_id, index, seed = given["task_id"], given["rollout_index"], given["seed"]
    if not isinstance(task_id, str) or not task_id:
        raise bad_value("task_id", "it must be a string, and not empty")
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise bad_value("rollout_index", "it must be a whole number of at least 0")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or seed < 0):
        raise bad_value("seed", "it must be a whole number of at least 0")
    return AgentTask(
        task_id=task_id,
        sample_index=0,
        rollout_index=index,
        loop=_LOOP,
        messages=(Message(role="user", content=task_id),),  # the agent has its own
        seed=seed,
    )
