"""The answers of an OpenAI-compatible address, checked: other programs answer in many ways.

Invariant: an answer is read as a `Reply`, or is an `AnswerError` that quotes it.
"""

import json
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from treadle.tracing.inert import inert
from treadle.trainer.rollout.chat_api.renderer import Reply

__all__ = ["AnswerError", "read_json", "read_reply"]

_QUOTED = 200  # characters of an answer in an error


class AnswerError(ValueError):
    """The answer has not the form of the API; the message has the cause and the answer."""


def _encodable(value: object) -> object:
    """Returns a text without halves of surrogate pairs, which JSON may hold and UTF-8 may not."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


_Text = Annotated[str, BeforeValidator(_encodable)]


class _Function(BaseModel):
    name: _Text
    arguments: _Text | None = None


class _Call(BaseModel):
    function: _Function


class _Part(BaseModel):
    text: _Text = ""  # others, as of reasoning, are no content


class _Message(BaseModel):
    content: _Text | list[_Part] | None = None
    refusal: _Text | None = None
    reasoning_content: _Text | None = None
    reasoning: _Text | None = None
    tool_calls: list[_Call] | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Usage(BaseModel):
    completion_tokens: int | None = None


class _Answer(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None


def read_json(body: bytes) -> object:
    """Returns the value that an answer holds.

    Raises:
        AnswerError: It is not JSON.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _error(f"is not JSON ({error})", body) from None


def read_reply(body: bytes, max_tokens: int) -> tuple[Reply, bool]:
    """Returns the reply of an answer, and whether a limit of length ended it.

    Args:
        max_tokens: Maximum number of tokens that was requested.

    Raises:
        AnswerError: It is no chat completion.
    """
    value = read_json(body)
    try:
        answer = _Answer.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        cause = f"{place}: {first['msg']}" if place else first["msg"]
        raise _error(f"is no chat completion ({cause})", body) from None
    choice = answer.choices[0]
    message, content = choice.message, choice.message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    counted = (answer.usage and answer.usage.completion_tokens) or 1
    reply = Reply(
        content=content or message.refusal or "",
        reasoning=message.reasoning_content or message.reasoning,
        calls=tuple(
            (call.function.name, call.function.arguments or "") for call in message.tool_calls or ()
        ),
        num_tokens=min(max(1, counted), max_tokens),
    )
    return reply, choice.finish_reason == "length"


def _error(cause: str, body: bytes) -> AnswerError:
    start = inert(body[: 4 * _QUOTED].decode(errors="replace")[:_QUOTED])
    return AnswerError(
        f"the answer {cause}; it begins {start!r}" if body else f"the answer {cause}"
    )
