"""The chat model: LangChain's interface to a trajectory's session.

Invariant: its messages are the sampled ones. It remembers each message that it returned. If a
graph sends one back unchanged, the session gets the recorded message and extends that turn's ids.
If the graph has changed, shortened or repeated its history, the session forks, and each sampled
token still counts in exactly one sample.

A chat model belongs to one trajectory. It is async only, because a blocking call would stop the
event loop that all trajectories share. LangChain's cache is never used. Callers wait in `ainvoke`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import invalid_tool_call
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from pydantic import Field, PrivateAttr

from treadle.agent_loop.capture import CapturedSession, CapturedTurn, LimitReachedError
from treadle.agent_loop.langgraph.messages import from_langchain, to_langchain
from treadle.agent_loop.langgraph.tools import tool_spec
from treadle.agent_loop.tokens.renderer import MalformedCall
from treadle.agent_loop.types import Message, StopReason, ToolCall, ToolSpec

__all__ = ["ChatModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """A message that was returned to the graph.

    Attributes:
        shown: The returned message; has fewer calls than `recorded` if there were too many.
        requests: Its calls that may be answered, in the model's order.
        closed: Whether the model ended the turn itself.
    """

    shown: Message
    recorded: Message
    requests: tuple[ToolCall | MalformedCall, ...]
    closed: bool


class ChatModel(BaseChatModel):
    """Samples messages in a trajectory.

    Attributes:
        session: The trajectory's session; renders, samples and records.
        max_parallel_calls: Maximum number of calls per message; others are left out and counted.
        max_tokens: Maximum number of tokens per completion. None means what the session's limits
            leave.
        model_name: Name for LangChain's own traces.
    """

    session: CapturedSession = Field(exclude=True, repr=False)
    max_parallel_calls: int = 1
    max_tokens: int | None = None
    model_name: str = "treadle"
    cache: bool | None = False  # a cached answer was sampled in another trajectory

    _given: dict[str, _Given] = PrivateAttr(default_factory=dict)
    _num_over_cap: int = PrivateAttr(default=0)
    _stop: StopReason | None = PrivateAttr(default=None)

    @property
    def _llm_type(self) -> str:
        return "treadle"

    @property
    def num_over_cap(self) -> int:
        """Number of calls so far that were left out of messages whose other calls may run."""
        return self._num_over_cap

    @property
    def stop(self) -> StopReason | None:
        """Why further completions are refused; None while they are not."""
        return self._stop

    def end(self, stop: StopReason) -> None:
        """Refuses further completions with a `LimitReachedError`; the first reason is kept."""
        self._stop = self._stop or stop

    def requests(self, message: AIMessage) -> tuple[ToolCall | MalformedCall, ...]:
        """Returns the calls of a message, including malformed ones, in the model's order.

        For a message that this model did not return, or that was changed since, returns the
        message's own calls.
        """
        given = self._known(message)
        return from_langchain(message).tool_calls if given is None else given.requests

    def is_closed(self, message: AIMessage) -> bool:
        """Returns whether the model ended the turn; False if a limit cut it."""
        given = self._known(message)
        return given is None or given.closed

    def bind_tools(
        self,
        tools: Sequence[Any],
        *,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Shows tools to the model.

        Args:
            tools: Anything that LangChain accepts as tools.
            tool_choice: None or "auto", because sampling is not constrained.
            kwargs: Passed to each call: `max_tokens`, `stop`.

        Raises:
            ValueError: `tool_choice` has another value.
        """
        if tool_choice not in (None, "auto"):
            raise ValueError(
                f"tool_choice is {tool_choice!r}; sampling is not constrained, so the model always "
                "chooses by itself: leave it out"
            )
        return self.bind(tools=[tool_spec(tool) for tool in tools], **kwargs)

    def with_structured_output(self, schema: Any, **kwargs: Any) -> NoReturn:
        """Is not supported.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "with_structured_output would constrain the sampling, and the trainer would treat "
            "constrained tokens as the policy's own: ask for the format in the prompt, and let "
            "the reward check it"
        )

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        raise NotImplementedError(
            "ChatModel is async only, because a blocking call would stop every other trajectory: "
            "use ainvoke, for the graph too"
        )

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        *,
        tools: Sequence[ToolSpec] = (),
        max_tokens: int | None = None,
        **unknown: Any,
    ) -> ChatResult:
        if unknown:
            raise TypeError(
                f"ChatModel accepts tools, max_tokens and stop, not {', '.join(unknown)}: the "
                "run's configuration sets the other sampling parameters"
            )
        if self._stop is not None:
            raise LimitReachedError(
                f"session {self.session.session_id} has ended: {self._stop.value}", stop=self._stop
            )
        turn = await self.session.complete(
            [self._recorded(message) for message in messages],
            tools=tools,
            max_tokens=self.max_tokens if max_tokens is None else max_tokens,
            stop=stop or (),
        )
        message = self._give(turn)
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _give(self, turn: CapturedTurn) -> AIMessage:
        requests = turn.requests[: self.max_parallel_calls]
        if turn.closed and self.session.exhausted is None:  # else no call of the turn is run
            self._num_over_cap += len(turn.requests) - len(requests)
        recorded = turn.parsed.message
        kept = tuple(call for call in recorded.tool_calls if call in requests)
        said = replace(recorded, tool_calls=kept)
        shown = to_langchain(said, id=f"{self.session.session_id}/{len(self._given)}")
        assert isinstance(shown, AIMessage)
        assert shown.id is not None
        shown.invalid_tool_calls = [
            invalid_tool_call(name=bad.name, args=bad.text, id=None, error=bad.reason)
            for bad in requests
            if isinstance(bad, MalformedCall)
        ]
        num_prompt, num_sampled = turn.num_prompt_tokens, turn.completion.num_tokens
        shown.usage_metadata = UsageMetadata(
            input_tokens=num_prompt,
            output_tokens=num_sampled,
            total_tokens=num_prompt + num_sampled,
        )
        shown.response_metadata = self._metadata(turn)
        self._given[shown.id] = _Given(
            shown=said,
            recorded=recorded,
            requests=requests,
            closed=turn.closed,
        )
        return shown

    def _metadata(self, turn: CapturedTurn) -> dict[str, object]:
        chunks = turn.completion.chunks
        return {
            "model_name": self.model_name,
            "session_id": self.session.session_id,
            "finish_reason": turn.finish.value,
            "token_ids": list(turn.completion.token_ids),
            "logprobs": [logprob for chunk in chunks for logprob in chunk.logprobs],
            "weight_versions": [chunk.weight_version for chunk in chunks],
            "continuation": turn.how.value,
        }

    def _known(self, message: BaseMessage) -> _Given | None:
        """Returns the record of this message if it was returned here and is unchanged."""
        given = self._given.get(message.id or "")
        return given if given is not None and given.shown == from_langchain(message) else None

    def _recorded(self, message: BaseMessage) -> Message:
        given = self._known(message)
        return from_langchain(message) if given is None else given.recorded
