"""Parses values as written after `key=` on a command line, in Hydra's syntax.

`null`, `true`/`False`, numbers (`1e-6`), quoted strings (`'error'`) and lists (`['a', b]`).
Everything else is a string, so that paths need no quotes. Mappings are not supported: no key takes
one.
"""

import re
from collections.abc import Iterator
from typing import TypeAlias

__all__ = ["ScalarError", "parse_value"]

Value: TypeAlias = bool | int | float | str | list["Value"] | None

_TOKEN = re.compile(
    r"\s*(?:(?P<quoted>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<mark>[\[\],])"
    r"|(?P<bare>[^\[\],'\"\s](?:[^\[\],'\"]*[^\[\],'\"\s])?))"
)
_INT = re.compile(r"[+-]?\d+(?:_\d+)*$")
_FLOAT = re.compile(r"[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?$")


class ScalarError(ValueError):
    """A value with a list or quote that is not closed."""


def parse_value(text: str) -> Value:
    """Returns the value that `text` spells.

    Raises:
        ScalarError: A bracket or quote is not closed, or something follows it.
    """
    stripped = text.strip()
    if not stripped.startswith(("[", "'", '"')):
        return _bare(stripped)
    tokens = list(_tokens(stripped))
    value, rest = _parse(tokens, 0, stripped)
    if rest != len(tokens):
        raise ScalarError(f"{text!r}: something follows the closing {tokens[rest - 1][1]}")
    return value


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or match.lastgroup is None:
            if text[position:].isspace():
                return
            raise ScalarError(f"{text!r}: a quote at {position} is not closed")
        yield match.lastgroup, match[match.lastgroup]
        position = match.end()


def _parse(tokens: list[tuple[str, str]], at: int, text: str) -> tuple[Value, int]:
    if at >= len(tokens):
        raise ScalarError(f"{text!r} ends where a value is expected")
    kind, token = tokens[at]
    if kind == "quoted":
        return re.sub(r"\\(.)", r"\1", token[1:-1]), at + 1
    if kind == "bare":
        return _bare(token), at + 1
    if token == "[":
        return _parse_list(tokens, at + 1, text)
    raise ScalarError(f"{text!r}: {token!r} where a value is expected")


def _parse_list(tokens: list[tuple[str, str]], at: int, text: str) -> tuple[Value, int]:
    items: list[Value] = []
    while not _closes(tokens, at, "]", text):
        item, at = _parse(tokens, at, text)
        items.append(item)
        at = _after_item(tokens, at, "]", text)
    return items, at + 1


def _closes(tokens: list[tuple[str, str]], at: int, mark: str, text: str) -> bool:
    if at >= len(tokens):
        raise ScalarError(f"{text!r}: missing {mark!r}")
    return tokens[at] == ("mark", mark)


def _after_item(tokens: list[tuple[str, str]], at: int, mark: str, text: str) -> int:
    if _closes(tokens, at, mark, text):
        return at
    if tokens[at] != ("mark", ","):
        raise ScalarError(f"{text!r}: expected ',' or {mark!r}, found {tokens[at][1]!r}")
    return at + 1


def _bare(text: str) -> Value:
    lowered = text.lower()
    if lowered == "null":
        return None
    if lowered in ("true", "false"):
        return lowered == "true"
    if _INT.match(text):
        return int(text)
    if _FLOAT.match(text):
        return float(text)
    return text
