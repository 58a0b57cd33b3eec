"""The generator of an OpenAI-compatible address, and the address as the servers of a rollout.

Invariant: what the address cannot do is refused before a request, and every failure of one is a
`GenerationError` that names the address and the model. The official client repeats what may pass
(connections, 408, 409, 429, 5xx).
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from treadle.agent_loop import (
    AgentLoopError,
    Completion,
    EngineFailedError,
    FinishReason,
    GenerationTimeoutError,
    OverloadedError,
    PlacedImage,
    PromptTooLongError,
    ReplicaUnavailableError,
    RequestContext,
    RequestRejectedError,
    SamplingParams,
    SetupError,
    TokenChunk,
)
from treadle.agent_loop.rpc import ServerInfo
from treadle.trainer.rollout.attached_server import UnmanagedServer
from treadle.trainer.rollout.chat_api.answer import AnswerError, read_json, read_reply
from treadle.trainer.rollout.chat_api.renderer import ApiRenderer

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAIError

__all__ = ["KEY_VARIABLE", "ApiServers"]

KEY_VARIABLE: Final = "OPENAI_API_KEY"
"""The environment variable of the key, the official client's."""

_OF_SETUP = (401, 403, 404)  # key, permission, name of the model: every request would fail
_TOO_LONG = "context_length_exceeded"
_MAX_SEED = 2**31  # a signed integer of 32 bits, which every server reads


class ApiServers(UnmanagedServer):
    """The address, as the servers of a rollout: it is sampled from, and neither started nor ended.

    Attributes:
        servers: The address, as one server without a vocabulary.
    """

    _TRIES: ClassVar[int] = 6
    """How often one request is sent at most."""

    def __init__(self, url: str, model: str, renderer: ApiRenderer) -> None:
        """Connects to nothing yet.

        Raises:
            SetupError: The official client is not installed, or refuses the address, or the key
                cannot be sent.
        """
        key = os.environ.get(KEY_VARIABLE, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise SetupError(
                f"{KEY_VARIABLE} is no key: it has a character that is not printable ASCII, such "
                "as the end of a line; set it to the key alone"
            )
        try:
            from openai import AsyncOpenAI
        except ModuleNotFoundError:
            raise SetupError(
                f"{url} is evaluated with OpenAI's client, which is not installed: "
                'pip install "treadle-trainer[api]"'
            ) from None
        super().__init__(url)
        self._url, self._model, self._renderer = url, model, renderer
        try:
            self._client: AsyncOpenAI = AsyncOpenAI(
                base_url=url, api_key=key or "none", max_retries=self._TRIES - 1
            )
        except Exception as error:  # of the HTTP library, which depends on the client's release
            raise _no_api(url, error) from error
        self.servers = (
            ServerInfo(
                address=url,
                server_version="",
                engine="chat completions",
                engine_version="",
                capabilities=frozenset(),
                architecture=model,
                vocab_size=0,
                context_length=0,
                tokenizer_sha256=b"",
                weight_version=0,
                max_in_flight=0,
                max_queued=0,
                max_request_bytes=0,
            ),
        )

    async def __aenter__(self) -> Self:
        """Requests the list of models, to find a wrong address or key before anything is written.

        Raises:
            SetupError: The address does not answer, is no API, or refuses the key.
        """
        try:
            await self._request_models()
        except BaseException:
            await self._client.close()
            raise
        return self

    async def _request_models(self) -> None:
        from openai import (
            APIConnectionError,
            AuthenticationError,
            OpenAIError,
            PermissionDeniedError,
        )

        client = self._client.with_options(max_retries=1, timeout=20)
        try:
            read_json((await client.models.with_raw_response.list()).content)
        except (AuthenticationError, PermissionDeniedError) as error:
            raise SetupError(
                f"{self._url} refuses the key of {KEY_VARIABLE}: {error.message}"
            ) from error
        except APIConnectionError as error:
            raise SetupError(f"{self._url} does not answer: {error.__cause__ or error}") from error
        except OpenAIError:
            pass  # not every server lists its models
        except Exception as error:  # a border: the transport raises what it likes
            raise _no_api(self._url, error) from error

    async def __aexit__(self, *exc_info: object) -> None:
        """Closes the connections."""
        await self._client.close()

    @property
    def generator(self) -> Self:
        """Samples at the address."""
        return self

    @property
    def live(self) -> Sequence[ServerInfo]:
        """The address."""
        return self.servers

    def finish_session(self, session_id: str) -> None:
        """Does nothing: the address has no sessions."""

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request: RequestContext,
        images: Sequence[PlacedImage] = (),
    ) -> Completion:
        """Requests one reply. Its log-probabilities are NaN: the address gives none of its ids.

        Args:
            prompt: Array of [P] ids that `ApiRenderer` gave.

        Raises:
            GenerationError: There is no reply; the subclass gives the reason.
            SetupError: The address has no such model, or no longer accepts the key.
        """
        from openai import OpenAIError

        if params.constraint is not None or params.ignore_eos:
            raise RequestRejectedError(f"{self._url} takes no constraint and no ignore_eos")
        messages, tools = self._renderer.request(prompt, images)
        left = request.deadline - asyncio.get_running_loop().time()
        options: dict[str, Any] = {"timeout": left} if math.isfinite(left) else {}
        if tools:
            options["tools"] = tools
        options |= _sampling(params)
        try:
            answer = await self._client.chat.completions.with_raw_response.create(
                model=self._model,
                messages=messages,  # type: ignore[arg-type]  # the union of all roles' mappings
                **options,
            )
        except OpenAIError as error:
            raise self._failed(error) from error
        try:
            reply, cut = read_reply(answer.content, params.max_tokens)
        except AnswerError as error:
            raise EngineFailedError(f"{self._url}: {self._model}: {error}") from error
        ids = self._renderer.add(reply)
        chunk = TokenChunk(token_ids=ids, logprobs=(math.nan,) * len(ids), weight_version=0)
        return Completion(chunks=(chunk,), finish=FinishReason.LENGTH if cut else FinishReason.STOP)

    def _failed(self, error: OpenAIError) -> AgentLoopError:
        from openai import APIConnectionError, APIStatusError, APITimeoutError, RateLimitError

        kind: type[AgentLoopError] = RequestRejectedError
        if isinstance(error, APITimeoutError):
            kind = GenerationTimeoutError
        elif isinstance(error, APIConnectionError):
            kind = ReplicaUnavailableError
        elif isinstance(error, RateLimitError):
            kind = OverloadedError
        elif isinstance(error, APIStatusError) and error.status_code >= 500:
            kind = EngineFailedError
        elif isinstance(error, APIStatusError) and error.status_code in _OF_SETUP:
            kind = SetupError
        elif _TOO_LONG in str(error):
            kind = PromptTooLongError
        return kind(f"{self._url}: {self._model}: {error}")


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """Returns the parameters of a request; those that OpenAI lacks only where they are set."""
    options: dict[str, Any] = {"max_completion_tokens": params.max_tokens}
    if params.temperature is not None:
        options["temperature"] = params.temperature
    if params.top_p not in (None, 1.0):
        options["top_p"] = params.top_p
    if params.seed is not None:
        options["seed"] = params.seed % _MAX_SEED
    further = {
        "top_k": params.top_k,
        "min_p": params.min_p or None,
        "repetition_penalty": params.repetition_penalty,
    }
    if found := {name: value for name, value in further.items() if value is not None}:
        options["extra_body"] = found
    return options


def _no_api(url: str, error: Exception) -> SetupError:
    return SetupError(
        f"{url} is not the base of an OpenAI-compatible API: {error}; it is what comes before "
        "/chat/completions, often https://HOST/v1"
    )
