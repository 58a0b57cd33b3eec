"""Sampling: from the weights that a request names, on servers that hold one set of weights.

Requests wait in a line. Those for the weights that the servers hold run at once; when one for other
weights comes to the head of the line, the servers are given these as soon as what runs has ended,
and all requests for them run together. So each set of weights has its turn.

Invariants:

1. A completion is sampled from the weights of its request and no others.
2. One task uses the pool of servers; it alone gives them weights and lets restarted ones in.

A request waits for its turn and for the servers; the client's poll waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from treadle.agent_loop import Completion, FinishReason, RequestContext, SamplingParams
from treadle.agent_loop.errors import AgentLoopError, GenerationError
from treadle.agent_loop.hf import HfRenderer
from treadle.policy.weight_sync.client import WeightSyncClient
from treadle.policy.weight_sync.errors import WeightSyncError
from treadle.policy.weight_sync.publisher import PublishReport
from treadle.serve.errors import Limits, ServiceError, gone
from treadle.serve.policies import Policies, Shape
from treadle.serve.record import Records
from treadle.serve.store import Store, StoredAnswer
from treadle.serve.wire import SampledSequence, encode_sample
from treadle.trainer.rollout.server_pool import ServerPool

__all__ = ["SampleRequest", "Sampler"]

_log = logging.getLogger(__name__)

_MAX_WAITING: Final = 8192
_MAX_ANSWERS: Final = 16384
"""Maximum number of answers kept for clients that fetch them late or again."""
_ATTEMPTS: Final = 3


@dataclass(slots=True, kw_only=True, eq=False)
class SampleRequest:
    """One request.

    Attributes:
        content: State whose weights sample; None: the base model's.
        scored: Whether the answer includes log-probabilities of the prompt.
        prompt_logprobs_from: First id of the prompt with a log-probability; None: no id has one.
        stops: Texts that end a completion.
        model: The model whose weights these are or were; None: the base model.
    """

    name: str
    content: str | None
    prompt: Sequence[int]
    params: Sequence[SamplingParams]
    scored: bool
    prompt_logprobs_from: int | None
    stops: Sequence[str]
    model: str | None = None
    attempts: int = 0
    answer: StoredAnswer | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Sampler:
    """Samples with the servers of a pool, which it gives weights."""

    def __init__(
        self,
        store: Store,
        policies: Policies,
        renderer: HfRenderer,
        records: Records,
        *,
        at_once: int,
        limits: Limits,
    ) -> None:
        """Args: at_once: Maximum number of completions that are computed at a time."""
        self._store = store
        self._policies = policies
        self._renderer = renderer
        self._records = records
        self._limits = limits
        self._in_flight = Counter[str]()
        records.totals.waiting.labels("sample").set_function(self._in_flight.total)
        self._slots = asyncio.Semaphore(at_once)
        self._requests: OrderedDict[str, SampleRequest] = OrderedDict()
        self._line: deque[SampleRequest] = deque()
        self._running: dict[asyncio.Task[None], SampleRequest] = {}
        self._news = asyncio.Event()
        self._held: str | None = None
        self._publishing: str | None = None
        self._version = 0
        self._disturbed = False

    async def publish(self, version: int, servers: Sequence[WeightSyncClient]) -> PublishReport:
        """Gives servers the weights that it is their turn to have; the pool calls it."""
        if (content := self._publishing) is None:
            policy = self._policies.any
            assert policy is not None, "it gave the servers the weights that they hold"
        else:
            row = self._store.row("SELECT shape FROM contents WHERE id = ?", content)
            if row is None:
                raise gone("sampler weights", content, "save them again, under a name")
            policy = await self._policies.of(Shape.read(row["shape"]))

        async def send() -> PublishReport:
            # Adapters begin at nothing, so a new model has the weights of the base.
            state = policy.initial() if content is None else content
            assert state is not None, "it is saved when a policy starts"
            await policy.take_up(state)
            return await policy.publisher.publish(version, servers)

        return await policy.use(send)

    def add(self, request: SampleRequest) -> None:
        """Puts a request into the line, once.

        Raises:
            ServiceError: The line is full.
        """
        if request.name in self._requests:
            return
        if len(self._line) >= _MAX_WAITING:
            raise ServiceError(f"{_MAX_WAITING} requests to sample wait: try again", status=429)
        session = request.name.partition(":")[0]
        self._limits.check_requests(session, self._in_flight[session])
        self._in_flight[session] += 1
        self._requests[request.name] = request
        while len(self._requests) > _MAX_ANSWERS:
            oldest = next(iter(self._requests.values()))
            if not oldest.done.is_set():
                break
            del self._requests[oldest.name]
        self._line.append(request)
        self._news.set()

    def cancel(self, name: str) -> None:
        """Ends a request that nobody waits for any more."""
        if (request := self._requests.get(name)) is None or request.done.is_set():
            return
        if request in self._line:
            self._line.remove(request)
        for task, running in self._running.items():
            if running is request:
                task.cancel()
        self._fail(request, ServiceError(f"request {name} was cancelled"))

    async def answer(self, name: str, wait_s: float) -> StoredAnswer | None:
        """Returns the answer to a request; None: not yet.

        Raises:
            ServiceError: There is no such request.
        """
        if (request := self._requests.get(name)) is None:
            raise gone("request to sample", name, "send it again")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await request.done.wait()
        return request.answer

    async def run(self, pool: ServerPool) -> None:
        """Serves the line, until it is cancelled; raises if no server is left."""
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                while self._line and await self._serve_head(pool):
                    pass
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    async def _serve_head(self, pool: ServerPool) -> bool:
        """Starts the head of the line and all for the same weights; returns False if it waits."""
        content = self._line[0].content
        if content != self._held or self._disturbed:
            if self._running:
                return False  # the end of the last one is news
            try:
                await self._turn_to(content, pool)
            except (AgentLoopError, ServiceError, WeightSyncError) as error:
                _log.warning("cannot sample from %s: %s", content, error)
                for request in self._taken(content):
                    self._fail(request, error)
                return True
        for request in self._taken(content):
            task = asyncio.create_task(self._sample(request, pool), name=request.name)
            self._running[task] = request
            task.add_done_callback(self._ended)
        return True

    def _taken(self, content: str | None) -> list[SampleRequest]:
        taken = [request for request in self._line if request.content == content]
        self._line = deque(request for request in self._line if request.content != content)
        return taken

    async def _turn_to(self, content: str | None, pool: ServerPool) -> None:
        if self._disturbed:
            self._publishing = self._held
            await pool.ensure_healthy()
            self._disturbed = False
        if content != self._held:
            self._publishing = content
            self._held = "?"  # until all servers have them
            self._version += 1
            await pool.sync_weights(self._version)
            self._held = content

    def _ended(self, task: asyncio.Task[None]) -> None:
        request = self._running.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("request %s failed", request.name, exc_info=error)
            self._fail(request, error)
        self._news.set()

    def _fail(self, request: SampleRequest, error: BaseException) -> None:
        self._answer(request, StoredAnswer.failed(error), "failed")

    def _answer(self, request: SampleRequest, answer: StoredAnswer, outcome: str) -> None:
        if request.done.is_set():
            return  # it was cancelled
        request.answer = answer
        request.done.set()
        self._in_flight -= Counter((request.name.partition(":")[0],))
        self._records.totals.requests.labels("sample", outcome).inc()

    async def _sample(self, request: SampleRequest, pool: ServerPool) -> None:
        request.attempts += 1
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._complete(request, number, pool))
                    for number in range(len(request.params))
                ]
        except ExceptionGroup as several:
            error = several.exceptions[0]
            if not isinstance(error, GenerationError):
                raise
            if error.retryable and request.attempts < _ATTEMPTS:
                self._disturbed = True
                self._line.appendleft(request)
            else:
                category: Any = "server" if error.retryable else "user"
                self._fail(request, ServiceError(str(error), category=category))
            return
        completions = [task.result() for task in tasks]
        prompt_logprobs = None
        if request.scored:
            known = completions[0].prompt_logprobs
            prompt_logprobs = [*[math.nan] * (len(request.prompt) - len(known)), *known]
        body = encode_sample([self._cut(each, request) for each in completions], prompt_logprobs)
        self._answer(request, StoredAnswer(body=body, type="application/x-protobuf"), "done")
        self._records.sampled(request.model, request.name, request.prompt, completions)

    async def _complete(self, request: SampleRequest, number: int, pool: ServerPool) -> Completion:
        async with self._slots:
            generator = pool.generator
            name = f"{request.name}:{number}:{request.attempts}"
            scored = request.prompt_logprobs_from if number == 0 else None
            try:
                return await generator.generate(
                    request.prompt,
                    request.params[number],
                    request=RequestContext(
                        request_id=name,
                        session_id=name,
                        deadline=math.inf,
                        min_weight_version=self._version,
                        prompt_logprobs_from=scored,
                    ),
                )
            finally:
                generator.finish_session(name)

    def _cut(self, completion: Completion, request: SampleRequest) -> SampledSequence:
        """Returns a completion up to its first stop, which stays."""
        tokens = completion.token_ids
        logprobs = [value for chunk in completion.chunks for value in chunk.logprobs]
        stopped = completion.finish is not FinishReason.LENGTH

        def is_stopped(count: int) -> bool:
            text = self._renderer.decode(tokens[:count])
            return any(stop in text for stop in request.stops)

        if request.stops and is_stopped(len(tokens)):
            fewest = bisect_left(range(len(tokens)), True, key=is_stopped)
            tokens, logprobs, stopped = tokens[:fewest], logprobs[:fewest], True
        return SampledSequence(tokens=tokens, logprobs=logprobs, stopped=stopped)
