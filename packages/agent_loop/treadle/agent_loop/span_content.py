"""The `inputs` and `output` of the spans of a trajectory: plain data, as it was at the time.

`messages_content` is also how a trajectory log has messages.

Invariant: nothing here is computed unless a sink records, and text is decoded only when a sink
writes it (`Services.trace_text`). Decoding reads token ids and gives nothing back to the loop, so
tokens are the same with and without it.
"""

from collections.abc import Sequence
from functools import partial

from treadle.agent_loop.loops.loop import Services
from treadle.agent_loop.trajectory import Trajectory
from treadle.agent_loop.types import Completion, Message, SamplingParams
from treadle.tracing import Deferred

_SAMPLING = tuple(SamplingParams.__dataclass_fields__)


def message_content(message: Message) -> dict[str, object]:
    """Returns a message without the fields that it does not use; images by their type."""
    content: dict[str, object] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        content["reasoning"] = message.reasoning
    if message.images:
        content["images"] = [image.mime for image in message.images]
    if message.name is not None:
        content["name"] = message.name
    if message.tool_call_id is not None:
        content["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        content["tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments": dict(call.arguments)}
            for call in message.tool_calls
        ]
    return content


def messages_content(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Returns the content of each message."""
    return [message_content(message) for message in messages]


def trajectory_output(trajectory: Trajectory, services: Services) -> dict[str, object]:
    """Returns the whole conversation and its score; with the text of the last sample, if wanted."""
    output: dict[str, object] = {
        "messages": messages_content(trajectory.messages),
        "reward": trajectory.reward,
        "answer": trajectory.answer,
    }
    if services.trace_text:
        ids, start = trajectory.tokens.ids, trajectory.tokens.num_prompt_tokens
        output |= _text(services, prompt=ids[:start], response=ids[start:])
    return output


def request_inputs(prompt: Sequence[int], params: SamplingParams) -> dict[str, object]:
    """Returns the prompt's length and the sampling parameters of a completion."""
    fields = ((name, getattr(params, name)) for name in _SAMPLING)
    sampling = {name: value for name, value in fields if value is not None}
    return {"prompt_tokens": len(prompt), "sampling": sampling}


def completion_output(
    prompt: Sequence[int], completion: Completion, services: Services
) -> dict[str, object]:
    """Returns what one completion is; with the text of prompt and completion, if wanted."""
    output: dict[str, object] = {
        "tokens": completion.num_tokens,
        "finish": completion.finish.value,
        "weight_versions": [chunk.weight_version for chunk in completion.chunks],
    }
    if services.trace_text:
        output |= _text(services, prompt=prompt, response=completion.token_ids)
    return output


def _text(
    services: Services, *, prompt: Sequence[int], response: Sequence[int]
) -> dict[str, object]:
    decode = services.renderer.decode
    return {
        # Copied: a sink decodes later.
        "prompt_text": Deferred(partial(decode, tuple(prompt))),
        "response_text": Deferred(partial(decode, tuple(response))),
    }
