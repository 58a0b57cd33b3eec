"""Renders a chat template as `apply_chat_template` does, without what that repeats at each call.

Invariant: the text is that of `tokenizer.apply_chat_template(..., tokenize=False)`.

`apply_chat_template` rebuilds all messages and tools at each call, because it may be given objects
whose methods a template could call. That and its other preparations take as long as the template.
Where all data are plain already, the compiled template is called with the data as they are; its
sandbox lets it change none of them, and looks up what is in a dictionary at once. Other data, and
tokenizers that override the method, take the public way.

Nothing waits, and any thread may call.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final

from jinja2.runtime import LoopContext
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_ATTRIBUTES: Final = frozenset(dir(dict))
_NUMBERS: Final = frozenset({"first", "last", "index", "index0", "length", "revindex", "revindex0"})
_OTHER_NAMES: Final = frozenset({"messages", "conversations"})  # no arguments of a template
# Writes all that a template is given, to compare both ways.
_ALL = (
    "{{ [messages, tools, documents, add_generation_prompt, bos_token | default(''),"
    " eos_token | default('')] | tojson }}"
)
_EXAMPLE: Final[list[dict[str, object]]] = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]},
    {"role": "assistant", "content": "", "reasoning_content": "b", "tool_calls": [{"id": "c"}]},
    {"role": "tool", "content": "d", "tool_call_id": "c", "name": "e"},
]


class ChatText:
    """The chat template of a tokenizer, as a function of messages and tools.

    Args:
        tokenizer: A tokenizer with a chat template; neither it nor the template changes later.
        kwargs: Passed to the template, for example `enable_thinking`.

    Attributes:
        direct: Whether plain data take the short way: this version of transformers prepares what a
            template is given as this class does. It is compared, because no interface promises it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, object]) -> None:
        self._tokenizer: Any = tokenizer
        self._kwargs = dict(kwargs)
        self._variables = {**tokenizer.special_tokens_map, **kwargs}
        # The template without tools, and with them: a tokenizer may have one for each.
        self._compiled: tuple[Any, Any] = (None, None)
        self.direct = self._is_as_expected()
        if self.direct:
            plain, shown = self._text_of(None), self._text_of([])
            compiled: dict[str | None, Any] = {
                text: _compile(text) for text in (plain, shown) if text is not None
            }
            self._compiled = compiled.get(plain), compiled.get(shown)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, object]] | None,
        *,
        open_turn: bool,
        plain_tools: bool,
    ) -> str:
        """Returns a conversation.

        Args:
            tools: Their schemas; None if there are none.
            open_turn: Whether to end with the header of the assistant's next turn.
            plain_tools: `is_plain(tools)`, which the caller computes once for many calls.

        Raises:
            Exception: The template refuses these messages.
        """
        compiled = self._compiled[tools is not None]
        if compiled is None or not (plain_tools and messages and all(map(is_plain, messages))):
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                add_generation_prompt=open_turn,
                tokenize=False,
                **self._kwargs,
            )
            return text
        return _render(compiled, messages, tools, open_turn=open_turn, variables=self._variables)

    def _text_of(self, tools: list[Any] | None) -> str | None:
        """Returns the template for chats with or without tools; None if there is none."""
        try:
            text: str = self._tokenizer.get_chat_template(tools=tools)
        except ValueError:  # there are several, and none for this
            return None
        return text

    def _is_as_expected(self) -> bool:
        """Returns whether both ways give a template the same."""
        public = PreTrainedTokenizerBase.apply_chat_template
        if (
            type(self._tokenizer).apply_chat_template is not public
            or not hasattr(chat_template_utils, "_compile_jinja_template")
            or not is_plain(self._kwargs)
            or not _OTHER_NAMES.isdisjoint(self._kwargs)
            or not inspect.signature(public).parameters.keys().isdisjoint(self._kwargs)
        ):
            return False
        tools: list[dict[str, object]] = [{"type": "function", "function": {"name": "e"}}]
        mine = _render(_compile(_ALL), _EXAMPLE, tools, open_turn=True, variables=self._variables)
        theirs = self._tokenizer.apply_chat_template(
            _EXAMPLE,
            tools=tools,
            chat_template=_ALL,
            add_generation_prompt=True,
            tokenize=False,
            **self._kwargs,
        )
        return bool(mine == theirs)


def _compile(text: str) -> Any:
    """Compiles a template for the sandbox of transformers, in which attributes are found faster.

    `message.role` is looked up as an attribute first, whose absence is an exception; a dictionary
    has no attributes but those of all dictionaries. `loop.last` is checked in five ways; it is a
    number.
    """
    environment = chat_template_utils._compile_jinja_template(text).environment.overlay()
    look_up = environment.getattr

    def getattr_of(value: Any, name: str) -> Any:
        if type(value) is dict and name not in _ATTRIBUTES and name in value:
            return value[name]
        if type(value) is LoopContext and name in _NUMBERS:
            return getattr(value, name)
        return look_up(value, name)

    environment.getattr = getattr_of
    template = environment.from_string(text)
    # A chain of mappings, which each rendering copies; nothing is added to it later.
    template.globals = dict(template.globals)
    return template


def is_plain(value: object) -> bool:
    """Returns whether a value is what JSON decodes to: exactly these types, all the way down."""
    kind = type(value)
    if kind is dict:
        items: Any = value
        for key, item in items.items():
            if type(key) is not str or not (type(item) in _SCALARS or is_plain(item)):
                return False
        return True
    if kind is list:
        values: Any = value
        return all(map(is_plain, values))
    return kind in _SCALARS


def _render(
    compiled: Any,
    messages: Sequence[dict[str, Any]],
    tools: list[dict[str, object]] | None,
    *,
    open_turn: bool,
    variables: Mapping[str, object],
) -> str:
    """As `apply_chat_template` of transformers 5.23 to 5.24 does, with data that are plain."""
    # It gives the reasoning under its older name too, in front, as here.
    seen = [
        {"thinking": message["reasoning_content"], **message}
        if "reasoning_content" in message
        else message
        for message in messages
    ]
    text: str = compiled.render(
        messages=seen, tools=tools, documents=None, add_generation_prompt=open_turn, **variables
    )
    return text
