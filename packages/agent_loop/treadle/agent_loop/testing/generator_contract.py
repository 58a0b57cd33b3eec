"""The generator contract: tests to inherit that every `TokenGenerator` must pass.

    @pytest.mark.asyncio
    class TestMyGenerator(GeneratorContract):
        @asynccontextmanager
        async def subject(self):
            yield GeneratorSubject(generator=MyGenerator(), ...)

A fake that passes the suite can be trusted: both `ScriptedGenerator` and the gRPC client over a
real server are tested with it. The suite imports no test framework.

The numbers: 1 bounds, 2 log-probabilities, 3 stop ids, 4 repeatable and not mixed up, 5 deadline,
6 cancellation, 7 versions, 8 prompts that do not fit, 9 sessions, 10 tokens that are
reported as they arrive.
"""

import asyncio
import math
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

from treadle.agent_loop.errors import (
    GenerationError,
    GenerationTimeoutError,
    PromptTooLongError,
    RequestRejectedError,
    WeightVersionBehindError,
)
from treadle.agent_loop.generator import RequestContext, TokenGenerator
from treadle.agent_loop.types import Completion, FinishReason, SamplingParams, TokenChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSubject:
    """A generator and the handles that the suite needs.

    Attributes:
        generator: The generator under test. With `ignore_eos`, its completions of `prompt` have
            at least 8 tokens; they depend only on the prompt and the parameters.
        long_prompt: A prompt that leaves no room in the context.
        vocab_size: Every id is below it.
        hold: Makes further calls wait until `release`.
        until_running: Waits until this number of calls run in the engine.
        until_idle: Waits until no call runs in the engine.
    """

    generator: TokenGenerator
    prompt: tuple[int, ...]
    long_prompt: tuple[int, ...]
    vocab_size: int
    weight_version: int
    hold: Callable[[], None]
    release: Callable[[], None]
    until_running: Callable[[int], Awaitable[None]]
    until_idle: Callable[[], Awaitable[None]]


EIGHT = SamplingParams(max_tokens=8, temperature=1.0, seed=7, ignore_eos=True)


def context(name: str, *, deadline: float = math.inf, version: int = 0) -> RequestContext:
    """Returns a request context in its own session."""
    return RequestContext(
        request_id=name, session_id=f"session-{name}", deadline=deadline, min_weight_version=version
    )


async def expect(error: type[GenerationError], call: Awaitable[Completion]) -> None:
    """Awaits a call that must fail with `error`."""
    try:
        completion = await call
    except error:
        return
    raise AssertionError(f"expected {error.__name__}, got {completion}")


class GeneratorContract:
    """The suite."""

    @abstractmethod
    def subject(self) -> AbstractAsyncContextManager[GeneratorSubject]:
        """Opens a fresh generator."""

    async def test_1_max_tokens_bounds_a_completion(self) -> None:
        """A completion that reaches max_tokens finishes with LENGTH."""
        async with self.subject() as s:
            completion = await s.generator.generate(s.prompt, EIGHT, request=context("a"))
        assert completion.num_tokens == 8
        assert completion.finish is FinishReason.LENGTH
        assert all(0 <= token < s.vocab_size for token in completion.token_ids)

    async def test_2_every_token_has_a_logprob_and_a_version(self) -> None:
        """Log-probabilities are finite and not above 0."""
        async with self.subject() as s:
            completion = await s.generator.generate(s.prompt, EIGHT, request=context("a"))
        for chunk in completion.chunks:
            assert len(chunk.logprobs) == len(chunk.token_ids)
            assert all(-math.inf < p <= 1e-3 for p in chunk.logprobs)
            assert chunk.weight_version == s.weight_version

    async def test_3_a_stop_id_ends_the_completion_and_is_its_last_token(self) -> None:
        """The same completion is cut after the first of its own ids that is a stop id."""
        async with self.subject() as s:
            whole = await s.generator.generate(s.prompt, EIGHT, request=context("a"))
            stop = whole.token_ids[4]
            params = replace(EIGHT, stop_token_ids=(stop,))
            cut = await s.generator.generate(s.prompt, params, request=context("b"))
        first = whole.token_ids.index(stop)
        assert cut.token_ids == whole.token_ids[: first + 1]
        assert cut.finish is FinishReason.STOP

    async def test_4_the_same_request_gives_the_same_ids_also_among_others(self) -> None:
        """Requests do not leak into each other."""
        async with self.subject() as s:
            alone = await s.generator.generate(s.prompt, EIGHT, request=context("a"))
            together = await asyncio.gather(
                *(s.generator.generate(s.prompt, EIGHT, request=context(f"b{i}")) for i in range(5))
            )
        assert {completion.token_ids for completion in together} == {alone.token_ids}

    async def test_5_a_deadline_ends_the_wait_and_the_work(self) -> None:
        """GenerationTimeoutError, and the engine is idle afterwards."""
        async with self.subject() as s:
            s.hold()
            deadline = asyncio.get_running_loop().time() + 0.1
            call = s.generator.generate(s.prompt, EIGHT, request=context("a", deadline=deadline))
            await expect(GenerationTimeoutError, call)
            await s.until_idle()
            s.release()

    async def test_6_cancelling_ends_the_work(self) -> None:
        """The engine is idle afterwards, and other calls continue."""
        async with self.subject() as s:
            s.hold()
            dropped = asyncio.create_task(
                s.generator.generate(s.prompt, EIGHT, request=context("a"))
            )
            await s.until_running(1)
            dropped.cancel()
            await asyncio.wait([dropped])
            assert dropped.cancelled()
            await s.until_idle()
            s.release()
            completion = await s.generator.generate(s.prompt, EIGHT, request=context("b"))
        assert completion.num_tokens == 8

    async def test_7_weights_that_are_too_old_are_not_sampled_from(self) -> None:
        """WeightVersionBehindError; the current version is accepted."""
        async with self.subject() as s:
            now = s.weight_version
            fits = context("a", version=now)
            assert (await s.generator.generate(s.prompt, EIGHT, request=fits)).num_tokens == 8
            behind = context("b", version=now + 1)
            await expect(
                WeightVersionBehindError, s.generator.generate(s.prompt, EIGHT, request=behind)
            )

    async def test_8_prompts_that_do_not_fit_are_refused(self) -> None:
        """PromptTooLongError, and RequestRejectedError for an empty prompt."""
        async with self.subject() as s:
            long = s.generator.generate(s.long_prompt, EIGHT, request=context("a"))
            await expect(PromptTooLongError, long)
            await expect(
                RequestRejectedError, s.generator.generate((), EIGHT, request=context("b"))
            )

    async def test_9_a_session_may_end_twice_or_never_have_begun(self) -> None:
        """Ending a session never fails, and its name may come back."""
        async with self.subject() as s:
            request = context("a")
            s.generator.finish_session(request.session_id)
            await s.generator.generate(s.prompt, EIGHT, request=request)
            s.generator.finish_session(request.session_id)
            s.generator.finish_session(request.session_id)
            again = await s.generator.generate(s.prompt, EIGHT, request=request)
        assert again.num_tokens == 8

    async def test_10_reported_tokens_begin_the_completion(self) -> None:
        """Whatever part of a completion is reported as it arrives, none of it is taken back."""
        reported: list[TokenChunk] = []
        async with self.subject() as s:
            request = replace(context("a"), on_tokens=reported.append)
            completion = await s.generator.generate(s.prompt, EIGHT, request=request)
        ids = [token for chunk in reported for token in chunk.token_ids]
        assert ids == list(completion.token_ids[: len(ids)])
        logprobs = [p for chunk in completion.chunks for p in chunk.logprobs]
        assert [p for chunk in reported for p in chunk.logprobs] == logprobs[: len(ids)]
