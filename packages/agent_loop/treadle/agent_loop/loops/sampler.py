"""The turn sampler: sends the requests of one trajectory to the generator.

Invariant: every request has the trajectory's session id, its own request id and its own seed, and
requests no more tokens than the budget leaves. A completion that breaks the contract raises before
the caller sees it. The sampler stores no token ids.

The tasks of one event loop may share a sampler. They wait in `sample`.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from treadle.agent_loop.errors import ContractError
from treadle.agent_loop.generator import RequestContext
from treadle.agent_loop.loops.loop import Services
from treadle.agent_loop.runner.seeds import derive_seed
from treadle.agent_loop.span_content import completion_output, request_inputs
from treadle.agent_loop.tokens.renderer import PlacedImage
from treadle.agent_loop.types import AgentTask, Completion, SamplingParams, TokenChunk
from treadle.tracing import span


class TurnSampler:
    """Requests the completions of one trajectory.

    Args:
        task: Determines the session id and the seeds of the completions.
        services: The generator, the sampling parameters and the deadline.

    Attributes:
        session_id: The same in every request; unique among attempts.
        num_requests: Number of requests so far, including those in flight.
        generate_s: Seconds waited for completions; concurrent requests add up.
        num_interruptions: Number of times that a server interrupted a completion.
    """

    def __init__(self, task: AgentTask, services: Services) -> None:
        self._task = task
        self._services = services
        # Bytes count, not characters: a request_id, which begins with it, has 128 at most.
        name = task.task_id.encode()[:64].decode(errors="ignore")
        self.session_id = f"{name}/{task.rollout_index}/{os.urandom(6).hex()}"
        self.num_requests = 0
        self.generate_s = 0.0
        self.num_interruptions = 0

    @property
    def next_request_id(self) -> str:
        """The id of the next request."""
        return f"{self.session_id}/{self.num_requests}"

    async def sample(
        self,
        prompt: Sequence[int],
        *,
        left: int,
        images: Sequence[PlacedImage] = (),
        num_routed_rows: int = 0,
        sampling: SamplingParams | None = None,
        seed: int | None = None,
        on_tokens: Callable[[TokenChunk], None] | None = None,
    ) -> Completion:
        """Samples one completion.

        Args:
            prompt: Array of [P] token ids.
            left: Number of tokens that the budget leaves; at least 1.
            num_routed_rows: Number of first rows whose experts are known already.
            sampling: Replaces the run's sampling parameters.
            seed: Seed of this completion. None means derived from the task's.

        Raises:
            GenerationError: The completion could not be made.
        """
        params = self._params(sampling or self._services.sampling, left=left, seed=seed)
        request = RequestContext(
            request_id=self.next_request_id,
            session_id=self.session_id,
            deadline=self._services.deadline,
            min_weight_version=self._services.min_weight_version,
            routed_experts_from=num_routed_rows if self._services.routed_experts else None,
            on_tokens=on_tokens,
        )
        self.num_requests += 1
        self._services.pulse.beat(f"generating as {request.request_id}")
        started = time.perf_counter()
        with span("generate", request_id=request.request_id) as trace:
            if trace.recording:
                trace.set(inputs=request_inputs(prompt, params))
            completion = await self._services.generator.generate(
                prompt, params, request=request, images=images
            )
            if trace.recording:
                trace.set(
                    prompt_tokens=len(prompt),
                    cached_prompt_tokens=completion.cached_prompt_tokens,
                    tokens=completion.num_tokens,
                    finish=completion.finish.value,
                    interruptions=completion.num_interruptions,
                    queue_s=completion.queue_s,
                    engine_s=completion.engine_s,
                    output=completion_output(prompt, completion, self._services),
                )
        self.generate_s += time.perf_counter() - started
        self.num_interruptions += completion.num_interruptions
        self._services.pulse.beat(f"continuing after {request.request_id}")
        _check(completion, params)
        return completion

    def close(self) -> None:
        """Ends the session at the generator. Idempotent."""
        self._services.generator.finish_session(self.session_id)

    def _params(self, base: SamplingParams, *, left: int, seed: int | None) -> SamplingParams:
        """Returns `base` bounded by the budget, with the template's stop ids and a seed."""
        stops = dict.fromkeys((*base.stop_token_ids, *self._services.renderer.stop_token_ids))
        task, index = self._task, self.num_requests
        if seed is None and task.seed is not None:
            seed = derive_seed(task.seed, index)
        elif seed is None and base.seed is not None:
            seed = derive_seed(base.seed, task.task_id, task.rollout_index, index)
        return replace(
            base, max_tokens=min(base.max_tokens, left), stop_token_ids=tuple(stops), seed=seed
        )


def _check(completion: Completion, params: SamplingParams) -> None:
    if completion.num_tokens > params.max_tokens:
        raise ContractError(
            f"the completion has {completion.num_tokens} tokens; max_tokens was {params.max_tokens}"
        )
    if completion.num_tokens == 0:
        raise ContractError("the completion has no token, not even the end of the turn")
