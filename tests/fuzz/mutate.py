"""Mutations: an input and a list of edits -> another input.

Invariant: pure; an edit is an operation and four small numbers, so Hypothesis draws lists of them,
and shrinks a list that breaks something to few edits with small numbers. An edit that does not fit
an input leaves it as it is.

Three kinds of bodies have operations of their own, because nearly all random bytes are refused by
the first line of a decoder: protobuf messages are edited field by field, with the lengths around
them put right, JSON value by value, and text by the words of its format.
"""

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from fuzz.inputs import Input, Part

Form = Literal["text", "json", "protobuf"]
MAX_BYTES = 1 << 18
"""Of a mutated body; repeated doubling would fill the memory."""


class Edit(NamedTuple):
    """One edit: what, at which part, at which place, and two numbers for the operation."""

    operation: int
    part: int
    place: int
    first: int
    second: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What edits take pieces from.

    Attributes:
        form: The kind of the bodies.
        words: Words of the format.
        heads: Heads that a part may get in place of its own.
        others: The other inputs of the corpus.
    """

    form: Form
    words: Sequence[bytes]
    heads: Sequence[str]
    others: Sequence[Input]


def mutate(parts: Input, edits: Sequence[Edit], material: Material) -> Input:
    """Returns the input after the edits."""
    for edit in edits:
        operations = _OPERATIONS[material.form]
        parts = operations[edit.operation % len(operations)](parts, edit, material)
    return parts


def _on_body(
    change: Callable[[bytes, Edit, Material], bytes],
) -> Callable[[Input, Edit, Material], Input]:
    def edited(parts: Input, edit: Edit, material: Material) -> Input:
        if not parts:
            return parts
        index = edit.part % len(parts)
        body = change(parts[index].body, edit, material)[:MAX_BYTES]
        return (*parts[:index], replace(parts[index], body=body), *parts[index + 1 :])

    return edited


def _flip(body: bytes, edit: Edit, material: Material) -> bytes:
    if not body:
        return body
    at = edit.place % len(body)
    return body[:at] + bytes([body[at] ^ (1 << edit.first % 8)]) + body[at + 1 :]


def _set(body: bytes, edit: Edit, material: Material) -> bytes:
    at = edit.place % (len(body) + 1)
    return body[:at] + bytes([edit.first % 256]) + body[at + 1 :]


def _delete(body: bytes, edit: Edit, material: Material) -> bytes:
    at = edit.place % (len(body) + 1)
    return body[:at] + body[at + 1 + edit.first % 32 :]


def _cut(body: bytes, edit: Edit, material: Material) -> bytes:
    return body[: edit.place % (len(body) + 1)]


def _repeat(body: bytes, edit: Edit, material: Material) -> bytes:
    at = edit.place % (len(body) + 1)
    piece = body[at : at + 1 + edit.first % 32]
    return body[:at] + piece * (2 + edit.second % 200) + body[at + len(piece) :]


def _word(body: bytes, edit: Edit, material: Material) -> bytes:
    if not material.words:
        return body
    at = edit.place % (len(body) + 1)
    word = material.words[edit.first % len(material.words)]
    return body[:at] + word + body[at + edit.second % 8 :]


def _splice(parts: Input, edit: Edit, material: Material) -> Input:
    """Continues a body with the end of another one, or puts a part of another input in between."""
    if not material.others or not parts:
        return parts
    other = material.others[edit.first % len(material.others)]
    if not other:
        return parts
    index, donor = edit.part % len(parts), other[edit.second % len(other)]
    if edit.place % 2:
        return (*parts[:index], donor, *parts[index:])
    body = parts[index].body
    at = edit.place % (len(body) + 1)
    joined = body[:at] + donor.body[edit.place % (len(donor.body) + 1) :]
    return (*parts[:index], replace(parts[index], body=joined[:MAX_BYTES]), *parts[index + 1 :])


def _drop(parts: Input, edit: Edit, material: Material) -> Input:
    index = edit.part % max(1, len(parts))
    return parts[:index] + parts[index + 1 :]


def _double(parts: Input, edit: Edit, material: Material) -> Input:
    if not parts or len(parts) > 32:
        return parts
    index = edit.part % len(parts)
    return (*parts[:index], parts[index], *parts[index:])


def _swap(parts: Input, edit: Edit, material: Material) -> Input:
    if len(parts) < 2:
        return parts
    changed = list(parts)
    one, two = edit.part % len(parts), edit.first % len(parts)
    changed[one], changed[two] = changed[two], changed[one]
    return tuple(changed)


def _head(parts: Input, edit: Edit, material: Material) -> Input:
    if not parts or not material.heads:
        return parts
    index = edit.part % len(parts)
    head = material.heads[edit.first % len(material.heads)]
    return (*parts[:index], Part(head, parts[index].body), *parts[index + 1 :])


# ------------------------------------------------------------------------------- protobuf

_NUMBERS = (0, 1, 2, 127, 128, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
_CONTENTS = (
    b"",
    b"\0",
    b"\xff",
    b"u",
    b"\x08\x01",
    b"a" * 129,
    b"\xed\xa0\x80",  # a lone surrogate
    b"\0" * 64,
    b"\x01" * 300,
    b"/proc/self/environ",
    b"127.0.0.1:1",
    b"\r\n",
)
_FLOATS = (float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e-45, 3.4e38)


class _Field(NamedTuple):
    start: int
    value: int  # first byte of the value; of a length-delimited field, of its content
    stop: int
    tag: int


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80 or shift > 63:
            return value, at


def _fields(data: bytes) -> list[_Field]:
    """The fields of a message, as far as it parses."""
    found, at = [], 0
    try:
        while at < len(data):
            start = at
            tag, at = _read_varint(data, at)
            value = at
            match tag & 7:
                case 0:
                    _, at = _read_varint(data, at)
                case 1:
                    at += 8
                case 5:
                    at += 4
                case 2:
                    length, value = _read_varint(data, at)
                    at = value + length
                case _:
                    break
            if at > len(data):
                break
            found.append(_Field(start, value, at, tag))
    except IndexError:
        pass
    return found


def _new_field(number: int, edit: Edit) -> bytes:
    match edit.second % 4:
        case 0:
            return _varint(number << 3) + _varint(_NUMBERS[edit.first % len(_NUMBERS)])
        case 1:
            value = struct.pack("<f", _FLOATS[edit.first % len(_FLOATS)])
            return _varint(number << 3 | 5) + value
        case _:
            content = _CONTENTS[edit.first % len(_CONTENTS)]
            return _varint(number << 3 | 2) + _varint(len(content)) + content


def _edit_field(body: bytes, edit: Edit, material: Material) -> bytes:
    fields = _fields(body)
    index = edit.place % (len(fields) + 1)
    if index == len(fields):
        return body + _new_field(1 + edit.part % 16, edit)
    field, deeper = fields[index], edit._replace(place=edit.place // (len(fields) + 1))
    before, content, after = body[: field.start], body[field.value : field.stop], body[field.stop :]
    whole = body[field.start : field.stop]
    match edit.second % 6:
        case 0:
            return before + after
        case 1:
            return before + whole * (2 + edit.first % 100) + after
        case 2:
            return before + _new_field(field.tag >> 3, edit._replace(second=edit.first)) + after
        case 3:
            return before + _varint(edit.first) + body[field.value :]
    if field.tag & 7 != 2:
        return before + _new_field(field.tag >> 3, edit) + after
    inner = _edit_field(content, deeper._replace(second=edit.second // 6), material)
    return before + _varint(field.tag) + _varint(len(inner)) + inner + after


# ------------------------------------------------------------------------------------ JSON

_RAW = (
    "null",
    "true",
    "0",
    "-1",
    "1.5",
    "1e400",
    "-1e-400",
    "NaN",
    "Infinity",
    "9007199254740993",
    "1" + "0" * 320,
    "1" + "0" * 5000,
    '""',
    '"x"',
    '"\\u0000"',
    '"\\ud800"',
    '"../../x"',
    '"' + "x" * 300 + '"',
    "[]",
    "{}",
    "[" * 200 + "]" * 200,
    "[" * 20_000 + "]" * 20_000,
    '{"a":' * 20_000 + "1" + "}" * 20_000,
    "[[],[]]",
    '{"": {}}',
)
_MARK = "\x01raw\x01"


def _places(value: object) -> Iterator[tuple[Any, Any]]:
    """Each place of a value: what holds it, and its key or index."""
    items: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, dict):
        items = iter(list(value.items()))
    elif isinstance(value, list):
        items = iter(list(enumerate(value)))
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def _edit_json(body: bytes, edit: Edit, material: Material) -> bytes:
    """Edits one value of the body, or of one of its lines if they are JSON each."""
    try:
        return _edit_value(body, edit)
    except (ValueError, RecursionError):
        lines = body.splitlines(keepends=True)
    if len(lines) < 2:
        return body
    index = edit.part % len(lines)
    try:
        lines[index] = _edit_value(lines[index].rstrip(b"\n"), edit) + b"\n"
    except (ValueError, RecursionError):
        return body
    return b"".join(lines)


def _edit_value(body: bytes, edit: Edit) -> bytes:
    root = json.loads(body)
    whole = [root]
    places = [(whole, 0), *_places(root)]
    holder, key = places[edit.place % len(places)]
    raw = _RAW[edit.first % len(_RAW)]
    match edit.second % 5:
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[raw.strip('"')[:40]] = holder.pop(key)
        case 1:
            holder.insert(key, holder[key])
        case _:
            holder[key] = _MARK
    text = json.dumps(whole[0] if whole else None)
    return text.replace(json.dumps(_MARK), raw).encode(errors="surrogatepass")


_Operation = Callable[[Input, Edit, Material], Input]
_BYTES: tuple[_Operation, ...] = tuple(map(_on_body, (_flip, _set, _delete, _cut, _repeat, _word)))
_PARTS: tuple[_Operation, ...] = (_splice, _drop, _double, _swap, _head)
_OPERATIONS: dict[Form, tuple[_Operation, ...]] = {
    "text": (*_BYTES, _on_body(_word), _on_body(_word), _on_body(_repeat), *_PARTS),
    "json": (*(_on_body(_edit_json),) * 8, *_BYTES, *_PARTS),
    "protobuf": (*(_on_body(_edit_field),) * 8, *_BYTES, *_PARTS),
}
