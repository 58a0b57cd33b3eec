"""What is appended to a turn, however it ends: over every template, every id and every cut.

Invariant: behind what was sampled comes what closes the open elements, the template's end of the
turn if the turn does not end with one, and the answer. Nothing of the turn with which the renderer
looks at the template is in it.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from chat_templates import table
from chat_templates.conversations import TOOLS, call, result, says, user
from chat_templates.fidelity_test import WHOLE, pair
from treadle.agent_loop import Message, RenderError, SetupError, ToolSpec
from treadle.agent_loop.hf import HfRenderer
from treadle.agent_loop.parsers.base import ClosingParser

DATA = os.environ.get("TREADLE_TEST_DATA")
ASK = user("Two times three?")
GO_ON, RESULT = user("Go on."), result(0, "result 6")
CALL = call(0)
# Ids of the format that stand for the template's own end.
ENDS = {
    "llama3_json": {"<|eom_id|>"},
    "gpt_oss": {"<|call|>", "<|return|>"},
}


def _renderers(tmp_path: Path) -> Iterator[tuple[str, str, HfRenderer]]:
    assert DATA is not None
    pair(WHOLE)[1].save_pretrained(tmp_path)
    for file in sorted((Path(DATA) / "chat_templates").glob("*.jinja")):
        template = file.read_text(encoding="utf-8")
        tokenizer = table.make_tokenizer(tmp_path, file.stem, template)
        tokenizer.add_tokens(["<|another_end|>"], special_tokens=True)
        try:
            renderer = HfRenderer(tokenizer)
        except SetupError:
            continue
        yield file.stem, table.parser_for_template(template) or "hermes", renderer  # type: ignore[attr-defined]


def _turn(renderer: HfRenderer, prompt: str, message: Message) -> str | None:
    """A turn as the template writes it, without its end; None if it does not take it."""
    tools = TOOLS if message.tool_calls else ()
    try:
        whole = renderer.template.text((ASK, message), tools, open_turn=False)
    except RenderError:
        return None
    if not whole.startswith(prompt):
        return None
    turn = whole[len(prompt) :].rstrip()
    ends = [renderer.decode([token]) for token in renderer.stop_token_ids]
    return next((turn.removesuffix(end) for end in ends if turn.endswith(end)), turn)


def _kinds(
    renderer: HfRenderer,
) -> Iterator[tuple[str, str, Message, tuple[ToolSpec, ...]]]:
    """Prompts, turns behind them, answers to these, and the tools."""
    for message, answer in (
        (says("Hello there."), GO_ON),
        (says("Hello there.", CALL), RESULT),
        (says("", CALL), RESULT),
    ):
        tools: tuple[ToolSpec, ...] = TOOLS if message.tool_calls else ()
        for thought in (None, "Let me see."):
            said = Message(
                role="assistant",
                content=message.content,
                tool_calls=message.tool_calls,
                reasoning=thought,
            )
            try:
                prompt = renderer.decode(renderer.render((ASK,), tools=tools).ids)
            except (SetupError, RenderError):
                continue
            turn = _turn(renderer, prompt, said)
            if turn is None:
                continue
            yield prompt, turn, answer, tools


def _closing(appended: str, text: str, where: str) -> str:
    """What is appended before the template's end of the turn."""
    assert appended.endswith(text), where
    return appended[: -len(text)]


def _unclosed(renderer: HfRenderer, prompt: str, turn: str) -> tuple[str, ...]:
    """The marks of what is open, by the parser's format."""
    if not isinstance(renderer.parser, ClosingParser):
        return ()
    header = max(prompt.rfind(header) for header in renderer.template.headers)
    return renderer.parser.unclosed(prompt[max(0, header) :] + turn)


def _packed(text: str) -> str:
    return "".join(text.split())


@pytest.mark.skipif(DATA is None, reason="TREADLE_TEST_DATA names no folder with chat_templates")
def test_nothing_but_the_end_and_the_answer_follows_a_turn_that_any_id_ended(
    tmp_path: Path,
) -> None:
    compared = 0
    for name, parser, renderer in _renderers(tmp_path):
        others = [renderer.encode("<|another_end|>")[-1], *renderer.stop_token_ids]
        for prompt, turn, answer, tools in _kinds(renderer):
            text = renderer.template.after_turn((answer,), tools).text
            ids = renderer.encode(prompt + turn)
            for end in others:
                token = renderer.decode([end])
                appended = renderer.decode(renderer.extend((*ids, end), (answer,), tools=tools).ids)
                where = f"{name}: {turn!r} ended by {token}, then {appended[:80]!r}"
                if text.startswith(token) or token in ENDS.get(parser, ()):
                    assert len(appended) < len(text), where
                    assert text.endswith(appended), where
                else:
                    # Some templates open the reasoning in the prompt and never close it.
                    marks = _unclosed(renderer, prompt, turn)
                    assert _closing(appended, text, where).split() == list(marks), where
                compared += 1
    assert compared > 500


@pytest.mark.skipif(DATA is None, reason="TREADLE_TEST_DATA names no folder with chat_templates")
def test_a_turn_that_is_cut_anywhere_is_closed_once(tmp_path: Path) -> None:
    compared = 0
    for name, _, renderer in _renderers(tmp_path):
        for prompt, turn, _, tools in _kinds(renderer):
            after = renderer.template.after_turn((GO_ON,), tools).text
            for size in range(1, len(turn), 7):
                cut = turn[:size]
                ids = renderer.encode(prompt + cut)
                appended = renderer.decode(renderer.extend(ids, (GO_ON,), tools=tools).ids)
                where = f"{name}: {cut!r} is cut, then {appended[:80]!r}"
                closing = _closing(appended, after, where)
                marks = "".join(_unclosed(renderer, prompt, cut))
                assert _unclosed(renderer, prompt, cut + closing) == (), where
                # A part of the first mark may be there already.
                assert _packed(cut + closing).endswith(_packed(marks)), where
                assert len(_packed(closing)) <= len(_packed(marks)), where
                compared += 1
    assert compared > 1000
