"""Every path of the SDK: answered, or refused by a sentence and with no fault of the server."""

import json
import re
from typing import Any

import pytest

from treadle.conformance.tinker.client import Failed, RemoteService
from treadle.tinker.sdk import PATHS

_MISSING = (404, 405)
_NOBODY = "tml-of-nobody"
_OF_FRAMEWORKS = ("Not Found", "Method Not Allowed")


@pytest.mark.parametrize(
    ("method", "path"), PATHS, ids=[re.sub(r"[ /:_]+", " ", " ".join(each)) for each in PATHS]
)
def test_it_is_answered_or_refused_by_a_sentence(
    service: RemoteService, method: str, path: str
) -> None:
    address = re.sub(r"{[^}]*}", "none", path)
    body: Any = b"" if path == "/forward_backward" else {} if method != "GET" else None
    # Without a name in its path it would delete what the caller has: the key itself.
    key = _NOBODY if method == "DELETE" and address == path else None
    try:
        service.call(method, address, body, key)
    except Failed as failed:
        assert failed.status < 500, f"status {failed.status}: {failed}"
        text = str(failed)
        try:
            found = json.loads(text)
        except ValueError:
            found = {}
        said = found if isinstance(found, dict) else {}
        sentence = said.get("detail") or said.get("error") or said.get("message")
        if failed.status in _MISSING and sentence in (None, *_OF_FRAMEWORKS):
            pytest.fail("the server does not have the path")
        assert sentence, f"status {failed.status} has no sentence: {text!r}"
