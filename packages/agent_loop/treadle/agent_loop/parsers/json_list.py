"""Calls as the items of one JSON list, as Mistral's older models and Cohere's models write them.

Invariant: each item is a separate span, so a malformed item does not affect the others; a list that
is no JSON is one malformed call.
"""

from dataclasses import dataclass

from treadle.agent_loop.parsers.json_text import CallError, decode_json, read_call, read_json
from treadle.agent_loop.parsers.scan import Scan


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemKeys:
    """The keys of an item.

    Attributes:
        id: Name of the call's id, which may be missing.
    """

    name: str = "name"
    arguments: str = "arguments"
    id: str = "id"


def read_list(scan: Scan, start: int, body: int, *marks: str, keys: ItemKeys) -> None:
    """Parses the calls of a list, and reports them.

    Args:
        start: Position of the mark before the list.
        marks: The list ends before these.
    """
    try:
        items, end = read_json(scan, body, *marks)
        if not isinstance(items, list):
            raise CallError(f"the calls must be a JSON list, as [{_example(keys)}]")
    except CallError as error:
        stop = scan.end_of_call(body, *marks)
        scan.malformed(start, stop, reason=str(error))
        return
    text = scan.text[body:end]
    place, seen = 1, start
    for item in items:
        place = _item_start(text, place)
        _, stop = decode_json(text, place)
        scan.mark(seen, body + place)
        try:
            name, arguments = read_call(item, name=keys.name, arguments=(keys.arguments,))
        except CallError as error:
            known = _text_at(item, keys.name)
            scan.malformed(body + place, body + stop, reason=str(error), name=known)
        else:
            call_id = _text_at(item, keys.id)
            scan.call(body + place, body + stop, name=name, arguments=arguments, call_id=call_id)
        place, seen = stop, body + stop
    scan.mark(seen, end)


def _example(keys: ItemKeys) -> str:
    return f'{{"{keys.name}": ..., "{keys.arguments}": {{...}}}}'


def _item_start(text: str, place: int) -> int:
    while text[place] in ", \t\r\n":
        place += 1
    return place


def _text_at(item: object, key: str) -> str | None:
    given = item.get(key) if isinstance(item, dict) else None
    return given if isinstance(given, str) and given else None
