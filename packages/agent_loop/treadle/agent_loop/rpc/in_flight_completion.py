"""One completion in flight, across all the calls that it takes.

Invariant: tokens that have arrived are kept, however their call ended. The next call continues
after them: its prompt is the original prompt plus these tokens. One request owns the object.
"""

from dataclasses import dataclass, field, replace
from typing import NoReturn

from treadle.agent_loop.errors import GenerationTimeoutError
from treadle.agent_loop.generator import RequestContext
from treadle.agent_loop.rpc.completion_stream import CompletionStream
from treadle.agent_loop.rpc.errors import RpcFailure
from treadle.agent_loop.tokens.renderer import PlacedImage
from treadle.agent_loop.types import (
    Completion,
    FinishReason,
    RoutedExperts,
    SamplingParams,
    TokenChunk,
)


@dataclass(slots=True, kw_only=True)
class InFlightCompletion:
    """One completion in flight, across all of its calls.

    Attributes:
        prompt: [P] ids of the request.
        params: Sampling parameters of the request.
        deadline: Time of the clock in seconds.
        routed: Experts that have arrived, of consecutive rows.
        prompt_logprobs: Log-probabilities of consecutive ids of the prompt that have arrived.
        failures: Number of failures per address.
        last_failures: The latest failure per address.
        waiting_until: Time when an overloaded or paused address may be used again; clock seconds.
        num_waits: Number of calls refused for overload or a pause.
        num_calls: Number of calls so far.
        num_resumes: Number of interruptions so far.
        cached_prompt_tokens: The number that the first call reported.
        queue_s: Seconds in servers' queues, over all calls.
        engine_s: Seconds in engines, over all calls.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    request: RequestContext
    images: tuple[PlacedImage, ...]
    deadline: float
    chunks: list[TokenChunk] = field(default_factory=list)
    routed: list[RoutedExperts] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
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
        """The tokens that have arrived."""
        return tuple(token for chunk in self.chunks for token in chunk.token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that have arrived."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    def next_prompt(self) -> tuple[int, ...]:
        """Returns the prompt plus the tokens that have arrived."""
        return (*self.prompt, *self.token_ids) if self.chunks else self.prompt

    def next_params(self) -> SamplingParams:
        """Returns the sampling parameters for the tokens that are missing.

        The seed stays the same. A token's draw depends on the seed and on the token's position in
        the sequence, so a resumed completion equals one that was not interrupted.
        """
        if not self.chunks:
            return self.params
        return replace(self.params, max_tokens=self.params.max_tokens - self.num_tokens)

    def next_routed_experts_from(self) -> int | None:
        """Returns the first row whose experts are missing, which an earlier call may have sent."""
        return self.routed[-1].stop if self.routed else self.request.routed_experts_from

    def next_prompt_logprobs_from(self) -> int | None:
        """Returns the first id of the prompt whose log-probability is missing; None: of none."""
        first = self.request.prompt_logprobs_from
        if first is None or first + len(self.prompt_logprobs) >= len(self.prompt):
            return None
        return first + len(self.prompt_logprobs)

    def next_request_id(self) -> str:
        """Returns an id that is unique per call, as the contract requires."""
        self.num_calls += 1
        name = self.request.request_id.encode()[-120:].decode(errors="ignore")
        return f"{name}.{self.num_calls}"

    def add(self, stream: CompletionStream) -> None:
        """Adds the tokens of a call. Adjacent chunks of one weight version are merged."""
        for chunk in stream.chunks:
            if self.chunks and self.chunks[-1].weight_version == chunk.weight_version:
                last = self.chunks.pop()
                chunk = TokenChunk(
                    token_ids=last.token_ids + chunk.token_ids,
                    logprobs=last.logprobs + chunk.logprobs,
                    weight_version=chunk.weight_version,
                    sampling_masks=last.sampling_masks + chunk.sampling_masks,
                )
            self.chunks.append(chunk)
        if (routed := stream.routed_experts()) is not None:
            self.routed.append(routed)
        self.prompt_logprobs += stream.prompt_logprobs
        if self.cached_prompt_tokens is None:
            self.cached_prompt_tokens = stream.cached_prompt_tokens
        self.queue_s += stream.queue_s
        self.engine_s += stream.engine_s

    def finish_already(self) -> FinishReason | None:
        """Returns the finish reason if the tokens that have arrived are already complete."""
        if self.chunks and self.chunks[-1].token_ids[-1] in self.params.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_tokens >= self.params.max_tokens else None

    def completion(self, finish: FinishReason) -> Completion:
        """Returns the whole completion."""
        return Completion(
            chunks=tuple(self.chunks),
            finish=finish,
            cached_prompt_tokens=self.cached_prompt_tokens or 0,
            queue_s=self.queue_s,
            engine_s=self.engine_s,
            num_interruptions=self.num_resumes,
            routed_experts=self.routed[0].followed_by(self.routed[1:]) if self.routed else None,
            prompt_logprobs=tuple(self.prompt_logprobs),
        )

    def give_up(self, why: str, kind: type[GenerationTimeoutError] | None = None) -> NoReturn:
        """Raises an error of the last failure's type that lists each replica's last failure."""
        failures = list(self.last_failures.values())
        error = kind or (type(failures[-1].error) if failures else GenerationTimeoutError)
        seen = "; ".join(str(failure.error) for failure in failures)
        raise error(
            f"request {self.request.request_id}: {why}, after {self.num_calls} calls and "
            f"{self.num_tokens} tokens" + (f". {seen}" if seen else "")
        )
