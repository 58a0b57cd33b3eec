"""A generator that follows a script strictly.

Invariant: it keeps the contract of `TokenGenerator` like a real server: stop ids end a completion,
`max_tokens` cuts it, and deadlines, versions and cancellations apply. The suite in
`generator_contract` runs against it. A request beyond the script fails the test.

With `hold`, calls wait for `release` or a cancellation, so tests can choose their interleavings.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from treadle.agent_loop.errors import (
    GenerationTimeoutError,
    PromptTooLongError,
    RequestRejectedError,
    WeightVersionBehindError,
)
from treadle.agent_loop.generator import RequestContext
from treadle.agent_loop.testing.byte_renderer import END, encode
from treadle.agent_loop.tokens.renderer import PlacedImage
from treadle.agent_loop.types import Completion, FinishReason, SamplingParams, TokenChunk

Reply = str | Sequence[int] | Completion | Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of a call of `generate`."""

    prompt: tuple[int, ...]
    params: SamplingParams
    context: RequestContext
    images: tuple[PlacedImage, ...] = ()


class ScriptedGenerator:
    """Returns prepared replies in the order of the calls.

    Args:
        replies: Each a string (its bytes and the end mark of `ByteRenderer` are sampled), ids, a
            `Completion` that is returned unchanged, or an exception that is raised.
        weight_version: Weight version of the tokens made from strings and ids.
        context_length: Maximum number of prompt and completion tokens; longer prompts are
            refused.

    Attributes:
        finished_sessions: Sessions that were finished, in order.
        num_running: Number of calls in flight.
        num_aborted: Number of calls that were cancelled or timed out.
    """

    def __init__(
        self,
        replies: Iterable[Reply] = (),
        *,
        weight_version: int = 0,
        context_length: int = 1 << 20,
    ) -> None:
        self._replies = iter(tuple(replies))
        self._weight_version = weight_version
        self._context_length = context_length
        self._gate = asyncio.Event()
        self._gate.set()
        self._changed = asyncio.Condition()
        self.requests: list[Request] = []
        self.finished_sessions: list[str] = []
        self.num_running = 0
        self.num_aborted = 0

    def hold(self) -> None:
        """Makes further calls wait until `release`."""
        self._gate.clear()

    def release(self) -> None:
        """Lets all waiting calls continue."""
        self._gate.set()

    async def until_running(self, count: int) -> None:
        """Waits until at least `count` calls are in flight."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.num_running >= count)

    async def until_idle(self) -> None:
        """Waits until no call is in flight."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.num_running == 0)

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request: RequestContext,
        images: Sequence[PlacedImage] = (),
    ) -> Completion:
        """Returns the next reply of the script.

        Raises:
            AssertionError: The script has no more replies.
            GenerationError: As from a server, or from the script.
        """
        self.requests.append(
            Request(prompt=tuple(prompt), params=params, context=request, images=tuple(images))
        )
        if not prompt:
            raise RequestRejectedError("prompt_token_ids is empty; at least one id is needed")
        if len(prompt) >= self._context_length:
            raise PromptTooLongError(
                f"{len(prompt)} prompt tokens; the context holds {self._context_length}"
            )
        if request.min_weight_version > self._weight_version:
            raise WeightVersionBehindError(
                f"serving version {self._weight_version}, wanted {request.min_weight_version}"
            )
        await self._count(1)
        try:
            async with asyncio.timeout_at(request.deadline):
                await self._gate.wait()
                await asyncio.sleep(0)
        except TimeoutError:
            self.num_aborted += 1
            raise GenerationTimeoutError(f"{request.request_id}: deadline exceeded") from None
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        finally:
            await self._count(-1)
        completion = self._next_reply(params)
        if request.on_tokens is not None:
            for chunk in completion.chunks:
                for token, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True):
                    request.on_tokens(replace(chunk, token_ids=(token,), logprobs=(logprob,)))
        return completion

    def finish_session(self, session_id: str) -> None:
        """Records the end of a session."""
        self.finished_sessions.append(session_id)

    async def _count(self, change: int) -> None:
        self.num_running += change
        async with self._changed:
            self._changed.notify_all()

    def _next_reply(self, params: SamplingParams) -> Completion:
        scripted = next(self._replies, None)
        match scripted:
            case None:
                raise AssertionError(f"no reply left for request {len(self.requests)}")
            case Exception():
                raise scripted
            case Completion():
                return scripted
            case str():
                return reply((*encode(scripted), END), params, version=self._weight_version)
            case _:
                return reply(scripted, params, version=self._weight_version)


def reply(token_ids: Sequence[int], params: SamplingParams, *, version: int = 0) -> Completion:
    """Returns a completion of these ids, cut as a server would cut it.

    Every log-probability is -0.5. If the ids end without a stop id, the finish reason is STOP.
    """
    kept: list[int] = []
    finish = FinishReason.STOP
    for token in token_ids:
        kept.append(token)
        if token in params.stop_token_ids:
            break
        if len(kept) == params.max_tokens:
            finish = FinishReason.LENGTH
            break
    chunk = TokenChunk(token_ids=tuple(kept), logprobs=(-0.5,) * len(kept), weight_version=version)
    return Completion(chunks=(chunk,), finish=finish)
