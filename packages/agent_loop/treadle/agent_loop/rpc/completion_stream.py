"""The completion stream: the messages of one Generate call, validated as they arrive.

Invariant: one `started`, then tokens, then one `finished`, then the end. Counts add up; there is
no token after a stop id or beyond max_tokens; ids are below the vocabulary size; versions are not
older than requested. If requested, the experts of all rows and the sampling masks of all tokens
come, and the log-probabilities of the prompt before the first token. Anything else is a
`ContractError`, because wrong tokens in the training data are worse than none.

`read` is the only place that consumes a stream. It cancels the call in `finally`, because leaving
`async for` does not, and the server would continue to generate. The reader waits for the server,
bounded by the call's deadline; HTTP/2 windows slow the server down if the reader is slow.
"""

import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn, Protocol

from treadle.agent_loop.errors import ContractError
from treadle.agent_loop.rpc.codec import decode_finish
from treadle.agent_loop.types import FinishReason, RoutedExperts, SamplingParams, TokenChunk
from treadle.rollout.v1 import generation_service_pb2 as generation_pb2

# A log-softmax in low precision may come out just above 0.
_ROUNDING = 1e-3


class GenerateCall(Protocol):
    """One completion: a call of Generate, or a part of a shared one (`shared_call`)."""

    def __aiter__(self) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Iterates over its messages."""
        ...

    def cancel(self) -> bool:
        """Ends it, if it has not ended."""
        ...


async def read(
    call: GenerateCall, on_event: Callable[[generation_pb2.GenerateResponse], None]
) -> None:
    """Reads a stream to its end; the call has ended when this returns or raises.

    Raises:
        grpc.aio.AioRpcError: The call failed.
    """
    try:
        async for event in call:
            on_event(event)
    finally:
        call.cancel()


@dataclass(slots=True, kw_only=True)
class CompletionStream:
    """The content of one stream so far.

    Attributes:
        address: The server's address, for error messages.
        params: Sampling parameters of the request.
        vocab_size: Vocabulary size of the server's model.
        min_weight_version: Oldest weight version that the request accepts.
        num_prompt_tokens: Number of ids in the request's prompt.
        asked_experts: The requested rows, without any row; None: no experts.
        num_prompt_logprobs: Number of requested log-probabilities of the prompt.
        chunks: Tokens so far; valid even if the stream fails afterwards.
        prompt_logprobs: Log-probabilities of the prompt so far; likewise.
        cached_prompt_tokens: Number of prompt tokens that the server did not have to compute.
        queue_s: Seconds from arrival at the server to the first step.
        prefill_s: Seconds before the first token; None before the end, and from a server that does
            not report them.
        paused_s: Seconds in which sampling was paused.
    """

    address: str
    params: SamplingParams
    vocab_size: int
    min_weight_version: int
    num_prompt_tokens: int = 0
    asked_experts: RoutedExperts | None = None
    num_prompt_logprobs: int = 0
    chunks: list[TokenChunk] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    cached_prompt_tokens: int = 0
    queue_s: float = 0.0
    engine_s: float = 0.0
    prefill_s: float | None = None
    paused_s: float = 0.0
    _routed: list[bytes] = field(default_factory=list)
    _num_tokens: int = 0
    _started: bool = False
    _stopped_by: int | None = None
    _finished: bool = False
    _finish: FinishReason | None = None

    def accept(self, event: generation_pb2.GenerateResponse) -> None:
        """Validates and adds the next message.

        Raises:
            ContractError: The message is out of order, or its numbers are wrong.
        """
        match event.WhichOneof("event"):
            case "started":
                self._take_start(event.started)
            case "prompt_logprobs":
                self._take_prompt_logprobs(event.prompt_logprobs)
            case "tokens":
                self._take_tokens(event.tokens)
            case "finished":
                self._take_finish(event.finished)
            case "batch":
                if event.batch.HasField("started"):
                    self._take_start(event.batch.started)
                for scores in event.batch.prompt_logprobs:
                    self._take_prompt_logprobs(scores)
                for tokens in event.batch.tokens:
                    self._take_tokens(tokens)
                if event.batch.HasField("finished"):
                    self._take_finish(event.batch.finished)
            case None:
                # From a newer server. Contract v1 only adds messages, so it may be skipped.
                self._check_place("an unknown event", started=self._started)

    def end(self) -> FinishReason | None:
        """Returns why the completion ended, after a normal end; None if it was interrupted.

        Raises:
            ContractError: The stream ended without `finished`.
        """
        if not self._finished:
            self._refuse("the stream ended without finished")
        return self._finish

    def routed_experts(self) -> RoutedExperts | None:
        """Returns the experts of the tokens so far; None if they were not requested."""
        if self.asked_experts is None:
            return None
        rows = replace(self.asked_experts, data=b"".join(self._routed))
        return rows.until(self.num_prompt_tokens + self._num_tokens)

    def _check_place(self, event: str, *, started: bool) -> None:
        """Checks that an event may come now; `started` is whether it must follow the start."""
        if self._finished:
            self._refuse(f"{event} came after finished")
        if self._started is not started:
            self._refuse(f"{event} came {'twice' if self._started else 'before started'}")

    def _take_start(self, begun: generation_pb2.GenerateStarted) -> None:
        self._check_place("started", started=False)
        self._started = True
        self.cached_prompt_tokens = begun.cached_prompt_tokens
        self.queue_s = begun.queue_time.ToNanoseconds() / 1e9

    def _take_prompt_logprobs(self, scores: generation_pb2.PromptLogprobs) -> None:
        self._check_place("prompt_logprobs", started=True)
        if self._num_tokens:
            self._refuse("prompt_logprobs came after a token")
        self._check_logprobs(scores.logprobs)
        self.prompt_logprobs += scores.logprobs
        if (got := len(self.prompt_logprobs)) > (asked := self.num_prompt_logprobs):
            self._refuse(f"{got} log-probabilities of the prompt came, {asked} were asked for")

    def _check_logprobs(self, logprobs: Sequence[float]) -> None:
        # A sum is finite only if all of them are: the usual case, without a loop in Python.
        if not logprobs or (math.isfinite(sum(logprobs)) and max(logprobs) <= _ROUNDING):
            return
        if bad := [p for p in logprobs if not -math.inf < p <= _ROUNDING]:
            self._refuse(f"a logprob is {bad[0]}; it must be finite and at most 0")

    def _take_tokens(self, tokens: generation_pb2.TokenChunk) -> None:
        self._check_place("tokens", started=True)
        ids = tuple(tokens.token_ids)
        if tokens.routed_experts:
            self._take_experts(tokens.routed_experts)
            if not ids:
                return
        if not ids:
            self._refuse("a chunk holds no token")
        if len(tokens.logprobs) != len(ids):
            self._refuse(f"{len(ids)} tokens came with {len(tokens.logprobs)} logprobs")
        masks = tuple(tokens.sampling_masks)
        if len(masks) != (asked := len(ids) if self.params.sampling_mask else 0):
            self._refuse(f"{len(masks)} sampling masks came with {len(ids)} tokens, not {asked}")
        logprobs = tuple(tokens.logprobs)
        self._check_logprobs(logprobs)
        if (got := len(self.prompt_logprobs)) < (asked := self.num_prompt_logprobs):
            self._refuse(f"a token came after {got} of {asked} log-probabilities of the prompt")
        if (largest := max(ids)) >= self.vocab_size:
            self._refuse(f"token {largest} is outside the vocabulary of {self.vocab_size}")
        if tokens.weight_version < self.min_weight_version:
            self._refuse(
                f"weight version {tokens.weight_version} sampled where "
                f"{self.min_weight_version} was asked for"
            )
        if self._num_tokens + len(ids) > self.params.max_tokens:
            self._refuse(f"more than max_tokens={self.params.max_tokens} tokens came")
        self._check_stops(ids)
        self._num_tokens += len(ids)
        self.chunks.append(
            TokenChunk(
                token_ids=ids,
                logprobs=logprobs,
                weight_version=tokens.weight_version,
                sampling_masks=masks,
            )
        )

    def _check_stops(self, ids: tuple[int, ...]) -> None:
        """Checks that nothing was sampled after a stop id."""
        if self._stopped_by is not None:
            self._refuse(f"token {ids[0]} was sampled after the stop id {self._stopped_by}")
        places = [ids.index(stop) for stop in self.params.stop_token_ids if stop in ids]
        if not places:
            return
        place = min(places)
        self._stopped_by = ids[place]
        if place + 1 < len(ids):
            self._refuse(f"token {ids[place + 1]} was sampled after the stop id {ids[place]}")

    def _take_experts(self, data: bytes) -> None:
        if self.asked_experts is None:
            self._refuse("experts came that were not asked for")
        if len(data) % self.asked_experts.row_bytes:
            row_bytes = self.asked_experts.row_bytes
            self._refuse(f"{len(data)} bytes of experts came; a row has {row_bytes}")
        self._routed.append(data)

    def _check_experts(self) -> None:
        """Checks that every row up to the last token's has come."""
        asked = self.asked_experts
        if asked is None or not self._num_tokens:
            return
        wanted = self.num_prompt_tokens + self._num_tokens - 1 - asked.first
        if (got := sum(map(len, self._routed)) // asked.row_bytes) != wanted:
            self._refuse(f"the experts of {got} rows came, {wanted} were asked for")

    def _take_finish(self, finished: generation_pb2.GenerateFinished) -> None:
        self._check_place("finished", started=True)
        if finished.num_tokens != self._num_tokens:
            self._refuse(f"{self._num_tokens} tokens came, finished says {finished.num_tokens}")
        self._check_experts()
        self._finish = decode_finish(finished.reason)
        if self._finish is FinishReason.STOP and self._num_tokens == 0:
            self._refuse("finished says stop, and no token came")
        self.engine_s = finished.engine_time.ToNanoseconds() / 1e9
        if finished.HasField("prefill_time"):
            self.prefill_s = finished.prefill_time.ToNanoseconds() / 1e9
            self.paused_s = finished.paused_time.ToNanoseconds() / 1e9
        self._finished = True

    def _refuse(self, problem: str) -> NoReturn:
        raise ContractError(f"{self.address} broke the contract of Generate: {problem}")
