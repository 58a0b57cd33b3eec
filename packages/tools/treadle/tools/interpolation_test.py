from functools import reduce
from operator import getitem
from typing import Any

import pytest

from treadle.tools.interpolation import InterpolationError, resolve

TREE: dict[str, Any] = {
    "data": {"n": 300, "rate": 1e-3, "files": ["a", "b"], "off": None, "own": "${.n}"},
    "run": {"project": "p", "name": "e", "key": "n", "both": "${.project}/${.name}"},
    "rollout": {"val": {"n": 4, "top": "${..limit}"}, "limit": 9, "deep": "${run.both}-${data.n}"},
}


def _value(text: str) -> Any:
    return resolve(text, "rollout.val.here", _look_up)


def _look_up(key: str) -> Any:
    return reduce(getitem, key.split("."), TREE)


# What OmegaConf 2.3 makes of each, in the same tree.
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain a{b}c", "plain a{b}c"),
        ("${data.n}", 300),
        ("${ data.rate }", 0.001),
        ("${data.files}", ["a", "b"]),
        ("${data.off}", None),
        ("${data.own}", 300),
        ("${.n}", 4),
        ("${..limit}", 9),
        ("${rollout.val.top}", 9),
        ("ck/${run.project}/${run.name}", "ck/p/e"),
        ("${rollout.deep}", "p/e-300"),
        ("${data.${run.key}}", 300),
        ("x${data.off}", "xNone"),
        ("a}${data.n}", "a}300"),
        ("${oc.select:data.n,5}", 300),
        ("${oc.select:.n,7}", 4),
        ("${oc.select:data.off,5}", None),
        ("${oc.select: no.such , 5 }", 5),
        ("${oc.select:no.such}", None),
        ("${oc.select:no.such,[1,2]}", [1, 2]),
        ("${oc.select:no.such,${run.both}}", "p/e"),
        ("t${oc.select:no.such,true}", "tTrue"),
        ("${oc.env:TREADLE_TEST}", "text ${data.n}"),
        ("${oc.env:TREADLE_TEST_NONE,me}_x", "me_x"),
        ("${oc.env:TREADLE_TEST_NONE,5}", "5"),
        ("${oc.env:TREADLE_TEST_NONE,null}", None),
    ],
)
def test_references_are_resolved_as_omegaconf_does(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: Any
) -> None:
    monkeypatch.setenv("TREADLE_TEST", "text ${data.n}")
    found = _value(text)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("${data.m}", "there is no key data.m"),
        ("a/${data.n", "is not closed"),
        ("${now:%Y}", r"\$\{now:\.\.\.\} is not available: only"),
        ("${oc.env:TREADLE_TEST_NONE}", "the environment has no TREADLE_TEST_NONE: set it"),
        ("${.here}", "rollout.val.here -> rollout.val.here: a reference to itself"),
        (r"\${data.n}", "a literal"),
        ("${oc.select:no.such,[1}", r"missing '\]'"),
    ],
)
def test_what_cannot_be_resolved_is_refused(text: str, message: str) -> None:
    here = "rollout.val.here"
    with pytest.raises(InterpolationError, match=message):
        resolve(text, here, lambda key: text if key == here else _look_up(key))
