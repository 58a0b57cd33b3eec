"""Each target holds for its corpus, and for some mutations of it, the same each time."""

import re
from typing import Any, cast

import pytest
from fuzz.engine import fuzz, replay
from fuzz.inputs import Part, read_corpus, read_input, write_input
from fuzz.main import main
from fuzz.make_corpus import MAKERS
from fuzz.mutate import Edit, Material, mutate
from fuzz.target import Fell, Target, logged
from fuzz.targets import TARGETS
from fuzz.targets.parsers import check_work

from treadle.agent_loop.parsers import ParsedText, ToolCallParser, parser_named
from treadle.tools.sandbox.testing import why_no_user_namespaces

# Two to four seconds each.
INPUTS = {
    "contract": 120,
    "router": 120,
    "parsers": 120,
    "endpoint": 80,
    "sandbox": 40,
    "run_directory": 40,
    "config": 120,
    "service": 20,
    "passes": 400,
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_holds_for_its_corpus_and_its_mutations(name: str) -> None:
    if name == "sandbox" and (why := why_no_user_namespaces()):
        pytest.skip(why)
    with TARGETS[name]() as target:
        replay(target, read_corpus(name))
        outcome = fuzz(name, target, inputs=INPUTS[name])
    assert outcome.fallen is None, f"{outcome.why}\n{write_input(outcome.fallen)}"
    assert outcome.inputs >= INPUTS[name]


@pytest.mark.parametrize("name", MAKERS)
def test_a_corpus_has_what_its_maker_makes(name: str) -> None:
    made = {stem: write_input(parts) for stem, parts in MAKERS[name]()}
    missing = made.keys() - read_corpus(name).keys()
    assert not missing, "run tests/fuzz/make_corpus.py"


class _Fragile(Target):
    """Falls for a body that holds a brace after a bracket."""

    promises = ""
    form = "text"
    words = (b"{",)

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def check(self, parts: tuple[Part, ...]) -> None:
        for part in parts:
            self.seen.append(part.body)
            if b"{" in part.body.partition(b"[")[2]:
                raise Fell("a brace after a bracket")


def test_what_falls_is_found_made_small_and_repeated_by_its_seed() -> None:
    one, two = _Fragile(), _Fragile()
    found = [fuzz("parsers", target, inputs=2000, first_seed=7) for target in (one, two)]
    assert found[0].fallen == found[1].fallen
    assert one.seen == two.seen
    assert found[0].fallen is not None
    assert [part.body for part in found[0].fallen] == [b"[{"]
    assert found[0].why == "a brace after a bracket"


class _Mortal(Target):
    """Dies of a brace."""

    promises = ""
    form = "text"
    words = (b"{",)

    def check(self, parts: tuple[Part, ...]) -> None:
        if any(b"{" in part.body for part in parts):
            raise TimeoutError("no answer")


def test_an_input_that_a_target_dies_of_is_found_and_made_small() -> None:
    outcome = fuzz("parsers", _Mortal(), inputs=200)
    assert outcome.fallen is not None
    assert [part.body for part in outcome.fallen] == [b"{"]
    assert outcome.why == "TimeoutError: no answer"


class _SlowParser:
    """Looks for an end from each beginning."""

    def __init__(self, parser: ToolCallParser) -> None:
        self._parser = parser

    def parse(self, text: str, **rest: Any) -> ParsedText:
        re.findall("<a>.*?</a>", text, re.DOTALL)
        return self._parser.parse(text, **rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


def test_the_work_of_regular_expressions_is_seen() -> None:
    with pytest.raises(Fell, match="16 times as many"):
        check_work(cast("ToolCallParser", _SlowParser(parser_named("hermes"))), "<a>")


def test_an_input_is_read_as_it_was_written() -> None:
    parts = (Part("a", "é\n\u2028".encode()), Part("b c", b"\xff\0"), Part("", b""))
    assert read_input(write_input(parts)) == parts


def test_edits_reach_into_messages_and_keep_their_lengths() -> None:
    inner = b"\x08\x05"
    material = Material(form="protobuf", words=(), heads=(), others=())
    changed = mutate((Part("m", b"\x12\x02" + inner),), [Edit(0, 0, 0, 0, 4)], material)
    (part,) = changed
    assert part.body[:1] == b"\x12"
    assert part.body[1] == len(part.body) - 2
    assert part.body[2:] != inner


def test_a_target_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nothing"])
    assert "there is no target 'nothing'; there are contract, router" in capsys.readouterr().err


def test_logs_are_seen_with_their_traces() -> None:
    import logging

    with logged() as log:
        try:
            raise ValueError("x")
        except ValueError:
            logging.getLogger("a").exception("oops")
        logging.getLogger("a").info("nothing")
    assert len(log) == 1
    assert "Traceback" in log[0]
