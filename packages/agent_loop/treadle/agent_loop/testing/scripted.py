"""A generator that says what it is told to say, and refuses to improvise.

Invariant: it keeps the promises of `TokenGenerator` like a real server does: stop ids end a
completion, `max_tokens` cuts it, deadlines, versions and cancellations are honoured; the suite in
`generator_contract` runs against it. A request that the script does not foresee fails the test.

A held generator (`hold`) waits for `release` or a cancellation; tests choose their interleavings
with it.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    """A call of `generate`, as it came."""

    prompt: tuple[int, ...]
    params: SamplingParams
    context: RequestContext
    images: tuple[PlacedImage, ...] = ()


class ScriptedGenerator:
    """Gives prepared replies in the order of the calls.

    Args:
        replies: Each a text (its bytes and the end mark of `ByteRenderer` are sampled), ids, a
            `Completion` that is returned as it is, or an exception that is raised.
        weight_version: Of the tokens made from texts and ids.
        context_length: Prompt plus completion; longer prompts are refused.

    Attributes:
        requests: Every call so far.
        finished_sessions: Sessions that were finished, in order.
        num_running: Calls that have begun and not ended.
        num_aborted: Calls that were cancelled or ran out of time.
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
        """Lets further calls wait until `release`."""
        self._gate.clear()

    def release(self) -> None:
        """Lets all waiting calls go on."""
        self._gate.set()

    async def until_running(self, count: int) -> None:
        """Waits until `count` calls are under way."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.num_running >= count)

    async def until_idle(self) -> None:
        """Waits until no call is under way."""
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
        """Gives the next reply of the script.

        Raises:
            AssertionError: The script is over.
            GenerationError: As a server would, or as the script says.
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
        return self._next_reply(params)

    def finish_session(self, session_id: str) -> None:
        """Notes the end of a session."""
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

    Every log-probability is -0.5. Ids that end without a stop id count as stopped by the model.
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
