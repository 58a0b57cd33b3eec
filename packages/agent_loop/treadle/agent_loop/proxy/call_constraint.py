"""The constraint under which a server samples what a request wants of the model's calls.

Invariant: pure. Only formats whose calls have their arguments as one JSON text can be enforced;
with others the request is let pass or refused by its reader.
"""

import json
from collections.abc import Sequence

from treadle.agent_loop.proxy.allowances import CallRules
from treadle.agent_loop.tokens.renderer import CallFrame, ChatRenderer, FramingRenderer
from treadle.agent_loop.types import Tag, TagConstraint, ToolSpec

_ANY_ARGUMENTS = json.dumps({"type": "object"})


def frames_calls(renderer: ChatRenderer) -> bool:
    """Returns whether calls can be enforced in the format of a renderer."""
    return isinstance(renderer, FramingRenderer) and renderer.call_frame("f") is not None


def call_constraint(
    tools: Sequence[ToolSpec], rules: CallRules, renderer: ChatRenderer
) -> TagConstraint:
    """Returns the constraint of a turn.

    Text before and between calls stays free, unless a call is required: then the turn begins with
    it, without reasoning. The arguments of a tool that is not strict are any object.

    Args:
        tools: Tools of the request; at least one.
    """
    tags = []
    frame: CallFrame | None = None
    for tool in tools:
        if rules.only not in (None, tool.name):
            continue
        assert isinstance(renderer, FramingRenderer), "`frames_calls` was asked"
        frame = renderer.call_frame(tool.name)
        assert frame is not None, "`frames_calls` was asked"
        strict = tool.name in rules.strict
        schema = json.dumps(dict(tool.parameters)) if strict else _ANY_ARGUMENTS
        tags.append(Tag(begin=frame.begin, schema=schema, end=frame.end))
    assert frame is not None, "readers check that there is a tool"
    return TagConstraint(
        tags=tuple(tags), trigger=frame.trigger, required=rules.required, single=rules.single
    )
