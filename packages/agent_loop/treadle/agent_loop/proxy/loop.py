"""The proxy loop: runs an existing agent as an agent loop, without changes to the agent.

Invariant: the agent runs only while its session is open, and the trajectory has exactly the tokens
that were sampled for it, however the agent ends:

| The agent ends | and the trajectory |
|---|---|
| normally | is delivered |
| with an error, after a limit refused its last request | is delivered, with that limit as stop |
| in any way, after the servers failed its last request | fails with that failure |
| with an error, `on_crash` FAIL | fails with an `AgentCrashedError` |
| with an error, `on_crash` DELIVER | is delivered so far, with stop AGENT_FAILED |
| without a completion | fails |

    loop = ProxyAgentLoop(my_agent)                     # async def my_agent(session: AgentSession)
    loop = ProxyAgentLoop(["node", "agent.js"])         # a program

The reward is the one that the agent returns, else the last one that it posted, else that of the
run's reward function. All trajectories of a loop share one HTTP server, which runs while any of
them runs. The runner waits in `run`; cancelling it ends the agent.
"""

import asyncio
import enum
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

from treadle.agent_loop.capture import CapturedSession
from treadle.agent_loop.errors import boundary
from treadle.agent_loop.loops.loop import Services
from treadle.agent_loop.proxy.agent import Agent, AgentCrashedError, AgentSession, CommandAgent
from treadle.agent_loop.proxy.allowances import AgentConstraints
from treadle.agent_loop.proxy.app import make_app
from treadle.agent_loop.proxy.server import SharedServer, TlsFiles, check_exposure
from treadle.agent_loop.proxy.sessions import AgentSampling, EndpointSession, EndpointSessions
from treadle.agent_loop.trajectory import Finding, Score, Trajectory
from treadle.agent_loop.types import AgentTask, StopReason
from treadle.tracing import Metric, Reduce

_MAX_BODY_BYTES = 64 << 20
_MIN_KEY = 16


class OnCrash(enum.StrEnum):
    """What to do with the trajectory of an agent that crashed."""

    FAIL = "fail"
    """The attempt fails; the run's failure policy may repeat it."""
    DELIVER = "deliver"
    """The tokens sampled so far are delivered and scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Endpoint:
    """The sessions and the server that the trajectories of one event loop share."""

    sessions: EndpointSessions
    server: SharedServer


class ProxyAgentLoop:
    """Runs a black-box agent, with one session per trajectory.

    Args:
        agent: A function, or the command of a program (see `CommandAgent`).
        on_crash: The treatment of the trajectory of an agent that crashed.
        sampling: The treatment of the temperature and top_p that the agent sends.
        constraints: The treatment of requests to constrain the sampling, which many frameworks send
            by default.
        api_key: Key of all sessions, for agents that read it from one variable of their process;
            a session's address, which nobody can guess, then tells it apart. None: each session
            has a key.
        model: Model name that the agent sees.
        host: Address to listen on; agents on other machines cannot reach the default.
        told_host: Name or address that agents get instead of `host`, for example if `host` means
            all addresses (0.0.0.0) or agents cannot reach it.
        port: 0 picks a free port.
        max_session_requests: Maximum number of in-flight requests per agent; others get 429.
        max_requests: Maximum number of in-flight requests of all agents.
        tls: Certificate and key to serve HTTPS with; agents must trust the certificate.
        insecure_allow_plaintext_beyond_loopback: Listen beyond loopback without TLS. Anyone on
            the way can then read the sessions' keys.

    Raises:
        ValueError: A bound is below 1, `api_key` has fewer than 16 characters, or `host` is an
            address that agents cannot use, or one beyond loopback without TLS.
    """

    def __init__(
        self,
        agent: Agent | Sequence[str],
        *,
        on_crash: OnCrash = OnCrash.FAIL,
        sampling: AgentSampling = AgentSampling.REFUSE,
        constraints: AgentConstraints = AgentConstraints.REFUSE,
        api_key: str | None = None,
        model: str = "policy",
        host: str = "127.0.0.1",
        told_host: str | None = None,
        port: int = 0,
        max_session_requests: int = 16,
        max_requests: int = 1024,
        tls: TlsFiles | None = None,
        insecure_allow_plaintext_beyond_loopback: bool = False,
    ) -> None:
        if min(max_session_requests, max_requests) < 1:
            raise ValueError(
                f"max_session_requests is {max_session_requests} and max_requests is "
                f"{max_requests}; both must be at least 1"
            )
        if api_key is not None and len(api_key) < _MIN_KEY:
            raise ValueError(
                f"api_key has {len(api_key)} characters; it must have at least {_MIN_KEY}, because "
                "anybody with it and a session's address can sample"
            )
        if told_host is None and host in ("", "0.0.0.0", "::"):
            raise ValueError(
                f"host is {host!r}, all addresses of this machine: told_host must say which of its "
                "names or addresses the agents are told"
            )
        check_exposure(
            host,
            tls=tls,
            allow="pass insecure_allow_plaintext_beyond_loopback=True",
            allowed=insecure_allow_plaintext_beyond_loopback,
        )
        self._api_key = api_key
        self._tls = tls
        self._agent = agent if callable(agent) else CommandAgent(agent)
        self._on_crash = OnCrash(on_crash)
        self._sampling = AgentSampling(sampling)
        self._constraints = AgentConstraints(constraints)
        self.required_capabilities = self._constraints.required_capabilities
        self._model = model
        self._host = host
        self._told_host = host if told_host is None else told_host
        self._port = port
        self._max_session_requests = max_session_requests
        self._max_requests = max_requests
        self._endpoints: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Endpoint] = (
            weakref.WeakKeyDictionary()
        )

    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        """Attempts the task once.

        Raises:
            RolloutError: The attempt failed.
            SetupError: The address to listen on is taken.
        """
        endpoint = self._endpoint()
        async with endpoint.server as address:
            with CapturedSession(task, services) as captured:
                session = EndpointSession(
                    captured,
                    services,
                    sampling=self._sampling,
                    constraints=self._constraints,
                    max_in_flight=self._max_session_requests,
                    key=self._api_key,
                )
                endpoint.sessions.add(session)
                crash, reward = None, None
                try:
                    services.pulse.beat("starting the agent")
                    reward = await self._run_agent(session, task, address)
                except AgentCrashedError as error:
                    crash = error
                finally:
                    await endpoint.sessions.remove(session)
                return self._finish(session, crash, reward)

    def _endpoint(self) -> _Endpoint:
        loop = asyncio.get_running_loop()
        if loop not in self._endpoints:
            sessions = EndpointSessions(max_in_flight=self._max_requests)
            app = make_app(sessions, model=self._model, max_body_bytes=_MAX_BODY_BYTES)
            server = SharedServer(
                app,
                host=self._host,
                told_host=self._told_host,
                port=self._port,
                tls=self._tls,
            )
            self._endpoints[loop] = _Endpoint(sessions=sessions, server=server)
        return self._endpoints[loop]

    async def _run_agent(
        self, session: EndpointSession, task: AgentTask, address: str
    ) -> float | None:
        below = f"{address}/sessions/{session.id}"
        told = AgentSession(
            task=task, base_url=f"{below}/v1", api_key=session.key, reward_url=f"{below}/reward"
        )
        with boundary(AgentCrashedError, f"agent of task {task.task_id!r}"):
            reward = await self._agent(told)
            return None if reward is None else Score(value=reward).value

    def _finish(
        self, session: EndpointSession, crash: AgentCrashedError | None, reward: float | None
    ) -> Trajectory:
        if session.failure is not None:
            raise session.failure
        crashed = crash is not None and session.refused is None
        if crashed and (self._on_crash is OnCrash.FAIL or not session.captured.assistant_turns):
            assert crash is not None
            raise crash
        trajectory = session.finish(
            StopReason.AGENT_FAILED if crashed else None,
            reward=session.reward if reward is None else reward,
            metrics=[Metric("proxy/agent_crashes", float(crashed), Reduce.SUM)],
        )
        if not crashed:
            return trajectory
        finding = Finding(kind="agent_crashed", text=str(crash))
        return replace(trajectory, findings=(*trajectory.findings, finding))
