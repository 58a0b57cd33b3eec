"""The loop of `loop_overhead` over Ray actors, as verl runs it: a minimal harness.

The batch is split over agent-loop workers (actors); each runs its share as tasks and gathers them;
each turn is one call of a server actor, an async actor, for all turns of a session the same one,
chosen by a heap of the worker's own; ids travel as Python lists; the driver waits for all workers.
That is verl with vLLM. With SGLang the server calls a second actor, which holds the engine.
"""

import asyncio
import heapq
from collections.abc import Sequence
from typing import Any

from loop_subject import Result, Run, Script, run_loop

from treadle.agent_loop import Completion, PlacedImage, RequestContext, SamplingParams
from treadle.agent_loop.testing.scripted import reply


class RayServers:
    """A worker's servers: verl's `AsyncLLMServerManager`."""

    def __init__(self, servers: Sequence[Any]) -> None:
        self._heap = [(0, number, server) for number, server in enumerate(servers)]
        heapq.heapify(self._heap)
        self._pins: dict[str, Any] = {}

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request: RequestContext,
        images: Sequence[PlacedImage] = (),
    ) -> Completion:
        """Calls the session's server actor."""
        if request.session_id not in self._pins:
            count, number, server = self._heap[0]
            heapq.heapreplace(self._heap, (count + 1, number, server))
            self._pins[request.session_id] = server
        ids = await self._pins[request.session_id].generate.remote(
            request.session_id,
            prompt_ids=list(prompt),
            sampling_params={"temperature": params.temperature, "top_p": params.top_p},
        )
        return reply(ids, params)

    def finish_session(self, session_id: str) -> None:
        """Forgets the session."""
        self._pins.pop(session_id, None)


class LoopWorker:
    """The actor that runs a share of the batch: verl's `AgentLoopWorker`."""

    def __init__(self, servers: Sequence[Any]) -> None:
        self._servers = RayServers(servers)

    async def generate_sequences(self, tasks: list[int]) -> Result:
        """Runs its share."""
        return await run_loop(self._servers, tasks)


class EngineActor:
    """The null engine in an actor: verl's server with vLLM, or the actor behind it with SGLang."""

    def __init__(self, turns: int) -> None:
        self._script = Script(turns)

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> list[int]:
        """Tokens in, tokens out."""
        return list(self._script.ids(request_id))


class ForwardingServer:
    """verl's server with SGLang: the engine is another actor's."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> list[int]:
        """Passes the call on."""
        ids: list[int] = await self._engine.generate.remote(
            request_id, prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        return ids


def on_ray(num_workers: int, turns: int, *, forwarding: bool) -> Run:
    """The batch over Ray actors; one server, as our side has one."""
    import ray

    options = {"num_cpus": 0, "max_concurrency": 100_000}
    server: Any = ray.remote(EngineActor).options(**options).remote(turns)
    if forwarding:
        server = ray.remote(ForwardingServer).options(**options).remote(server)
    servers = [server]
    workers: list[Any] = [
        ray.remote(LoopWorker).options(**options).remote(servers) for _ in range(num_workers)
    ]

    async def run(num_tasks: int) -> Result:
        shares = [list(range(first, num_tasks, num_workers)) for first in range(num_workers)]
        calls = [
            worker.generate_sequences.remote(share)
            for worker, share in zip(workers, shares, strict=True)
        ]
        results = await asyncio.gather(*calls)
        return Result(
            samples=[sample for result in results for sample in result.samples],
            turns_s=[turn for result in results for turn in result.turns_s],
        )

    return run
