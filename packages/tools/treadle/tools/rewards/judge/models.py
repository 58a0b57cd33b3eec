"""The judge's model: sends it one question and returns the text of its answer.

`OpenAiModel` uses the official client, which retries what may pass (connections, 408, 409, 429,
5xx) with growing waits. `ServedModel` renders the chat and samples on rollout servers, whose client
does the same.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self
from uuid import uuid4

from treadle.agent_loop import (
    GenerationError,
    Message,
    RenderError,
    RequestContext,
    SamplingParams,
    SetupError,
    TokenGenerator,
)
from treadle.tools.arguments import require_extra
from treadle.tools.rewards.judge.rubric import OpenAiAddress, RolloutServers, Rubric
from treadle.tracing import traced

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam

__all__ = ["JudgeModel", "ModelAnswer", "ModelError", "model_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAnswer:
    """A model's answer; `requests` counts those that it took, at least 1."""

    text: str
    requests: int


class ModelError(Exception):
    """The model gave no answer; the message gives its address and the cause."""


class JudgeModel(Protocol):
    """Answers a chat. Entered before the first question, left after the last."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...

    async def ask(self, question: str, *, max_requests: int) -> ModelAnswer:
        """Returns the model's answer.

        Args:
            max_requests: How often it may be sent, at least 1.

        Raises:
            ModelError: There is none.
        """
        ...


def model_of(rubric: Rubric) -> JudgeModel:
    """Returns the model of a rubric.

    Raises:
        SetupError: A library, a key or the model's tokenizer is missing.
    """
    if isinstance(rubric.model, OpenAiAddress):
        return OpenAiModel(rubric, rubric.model)
    return ServedModel(rubric, rubric.model)


class OpenAiModel:
    """A model behind an OpenAI-compatible address."""

    def __init__(self, rubric: Rubric, address: OpenAiAddress) -> None:
        require_extra("a judge at an OpenAI-compatible address", "openai", "judge")
        from openai import AsyncOpenAI

        key = "none"
        if address.api_key_variable is not None:
            key = os.environ.get(address.api_key_variable, "")
            if not key:
                raise SetupError(
                    f"the judge at {address.base_url} takes its key from the environment variable "
                    f"{address.api_key_variable}, which is not set"
                )
        self._rubric, self._address = rubric, address
        self._client = AsyncOpenAI(
            base_url=address.base_url,
            api_key=key,
            timeout=rubric.timeout_s,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.close()

    @traced
    async def ask(self, question: str, *, max_requests: int) -> ModelAnswer:
        """See `JudgeModel`."""
        from openai import OpenAIError

        rubric = self._rubric
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": question}]
        if rubric.system:
            messages.insert(0, {"role": "system", "content": rubric.system})
        client = self._client.with_options(max_retries=max_requests - 1)
        try:
            response = await client.chat.completions.with_raw_response.create(
                model=self._address.name,
                messages=messages,
                temperature=rubric.temperature,
                max_tokens=rubric.max_tokens,
            )
            answer = response.parse()
        except OpenAIError as error:
            raise ModelError(
                f"the judge at {self._address.base_url}: {type(error).__name__}: {error}"
            ) from error
        text = answer.choices[0].message.content if answer.choices else None
        return ModelAnswer(text=text or "", requests=response.retries_taken + 1)


class ServedModel:
    """A model on rollout servers."""

    def __init__(self, rubric: Rubric, servers: RolloutServers) -> None:
        from treadle.agent_loop.hf import HfRenderer

        self._rubric, self._servers = rubric, servers
        self._renderer = HfRenderer.from_directory(servers.path)
        token = _read(servers.token_file)
        self._token = None if token is None else token.decode().strip()
        self._roots = _read(servers.root_certificates)
        self._stack = AsyncExitStack()
        self._generator: TokenGenerator | None = None

    async def __aenter__(self) -> Self:
        from treadle.agent_loop.rpc import ChannelSecurity, Requirements, connect

        servers = self._servers
        self._generator = await self._stack.enter_async_context(
            connect(
                servers.addresses,
                requirements=Requirements(
                    tokenizer_sha256=self._renderer.tokenizer_sha256,
                    vocab_size=self._renderer.vocab_size,
                ),
                security=ChannelSecurity(
                    tls=servers.root_certificates is not None,
                    root_certificates=self._roots,
                    token=self._token,
                ),
                client="treadle-tools-judge",
            )
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        self._generator = None
        await self._stack.aclose()

    @traced
    async def ask(self, question: str, *, max_requests: int) -> ModelAnswer:
        """See `JudgeModel`; what the servers' client repeats until `timeout_s` is one request."""
        assert self._generator is not None, "the judge is entered before it is asked"
        rubric, name = self._rubric, f"judge-{uuid4()}"
        system = (Message(role="system", content=rubric.system),) if rubric.system else ()
        try:
            prompt = self._renderer.render(
                (*system, Message(role="user", content=question)), tools=()
            ).ids
            completion = await self._generator.generate(
                prompt,
                SamplingParams(
                    max_tokens=rubric.max_tokens,
                    temperature=rubric.temperature,
                    stop_token_ids=self._renderer.stop_token_ids,
                ),
                request=RequestContext(
                    request_id=name,
                    session_id=name,
                    deadline=asyncio.get_running_loop().time() + rubric.timeout_s,
                ),
            )
        except (GenerationError, RenderError) as error:
            where = ", ".join(self._servers.addresses)
            raise ModelError(f"the judge on {where}: {type(error).__name__}: {error}") from error
        finally:
            self._generator.finish_session(name)
        text = self._renderer.parse(completion.token_ids, prompt=prompt).message.content
        return ModelAnswer(text=text, requests=1)


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise SetupError(f"cannot read the judge's {path}: {error.strerror}") from error
