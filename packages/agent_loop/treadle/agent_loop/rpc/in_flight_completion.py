"""The work: one completion under way, over all of the calls that it takes.

Invariant: what has arrived is kept, however a call ended; the next call asks for the rest of it,
with the prompt plus what arrived. One request owns it.
"""

from dataclasses import dataclass, field, replace
from typing import NoReturn

from treadle.agent_loop.errors import GenerationTimeoutError
from treadle.agent_loop.generator import RequestContext
from treadle.agent_loop.rpc.completion_stream import CompletionStream
from treadle.agent_loop.rpc.errors import RpcFailure
from treadle.agent_loop.tokens.renderer import PlacedImage
from treadle.agent_loop.types import Completion, FinishReason, SamplingParams, TokenChunk


@dataclass(slots=True, kw_only=True)
class Work:
    """One completion under way, over all of its calls."""

    prompt: tuple[int, ...]
    params: SamplingParams
    request: RequestContext
    images: tuple[PlacedImage, ...]
    deadline: float
    chunks: list[TokenChunk] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    last_failures: dict[str, RpcFailure] = field(default_factory=dict)
    waiting_until: dict[str, float] = field(default_factory=dict)
    num_waits: int = 0
    num_calls: int = 0
    num_resumes: int = 0
    cached_prompt_tokens: int | None = None
    queue_s: float = 0.0
    engine_s: float = 0.0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All that has arrived."""
        return tuple(token for chunk in self.chunks for token in chunk.token_ids)

    def next_prompt(self) -> tuple[int, ...]:
        """The prompt plus what has arrived."""
        return (*self.prompt, *self.token_ids)

    def next_params(self) -> SamplingParams:
        """What is left to sample.

        The seed stays: a token's draw depends on it and on the token's place in the sequence, so
        that a resumed completion is the undisturbed one.
        """
        return replace(self.params, max_tokens=self.params.max_tokens - len(self.token_ids))

    def next_request_id(self) -> str:
        """Unique per call, as the contract asks."""
        self.num_calls += 1
        name = self.request.request_id.encode()[-120:].decode(errors="ignore")
        return f"{name}.{self.num_calls}"

    def add(self, stream: CompletionStream) -> None:
        """Keeps what a call brought. Runs of one weight version become one chunk."""
        for chunk in stream.chunks:
            if self.chunks and self.chunks[-1].weight_version == chunk.weight_version:
                last = self.chunks.pop()
                chunk = TokenChunk(
                    token_ids=last.token_ids + chunk.token_ids,
                    logprobs=last.logprobs + chunk.logprobs,
                    weight_version=chunk.weight_version,
                )
            self.chunks.append(chunk)
        if self.cached_prompt_tokens is None:
            self.cached_prompt_tokens = stream.cached_prompt_tokens
        self.queue_s += stream.queue_s
        self.engine_s += stream.engine_s

    def finish_already(self) -> FinishReason | None:
        """Whether what arrived before a failure or an interruption is all there could be."""
        ids = self.token_ids
        if ids and ids[-1] in self.params.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(ids) >= self.params.max_tokens else None

    def completion(self, finish: FinishReason) -> Completion:
        """The whole of it."""
        return Completion(
            chunks=tuple(self.chunks),
            finish=finish,
            cached_prompt_tokens=self.cached_prompt_tokens or 0,
            queue_s=self.queue_s,
            engine_s=self.engine_s,
            num_interruptions=self.num_resumes,
        )

    def give_up(self, why: str, kind: type[GenerationTimeoutError] | None = None) -> NoReturn:
        """Raises the last failure's kind of error, with the last failure of every replica."""
        failures = list(self.last_failures.values())
        error = kind or (type(failures[-1].error) if failures else GenerationTimeoutError)
        seen = "; ".join(str(failure.error) for failure in failures)
        raise error(
            f"request {self.request.request_id}: {why}, after {self.num_calls} calls and "
            f"{len(self.token_ids)} tokens" + (f". {seen}" if seen else "")
        )
