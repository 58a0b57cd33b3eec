"""Tests of the Hugging Face renderer, with a Qwen2.5-style tokenizer made here."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from treadle.agent_loop import (
    Message,
    PromptTooLongError,
    RenderError,
    SetupError,
    ToolCall,
    ToolSpec,
)
from treadle.agent_loop.hf.chat_renderer import HfRenderer
from treadle.agent_loop.parsers import HermesParser, ParsedText

# Written for this test in the format of Qwen2.5's ChatML template.
TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}
{%- else %}{{- 'You are helpful.' }}
{%- endif %}
{{- '\n\n# Tools\n<tools>' }}
{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant' }}
{%- if message.content %}{{- '\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CALCULATOR = ToolSpec(name="calculator", description="Evaluates.")
TASK = (
    Message(role="system", content="Be brief."),
    Message(role="user", content="What is 2*3?"),
)
CALL = ToolCall(id="call_0", name="calculator", arguments={"expression": "2*3"})


def make_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level BPE with Qwen's special tokens, trained on a few lines."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIALS,
        show_progress=False,
    )
    lines = ["assistant\n", "user\n<tool_response>\n6\n</tool_response>", "\n\n", "system\nBe"]
    backend.train_from_iterator(lines * 4, trainer)
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    return tokenizer


SHARED = HfRenderer(make_tokenizer())


@pytest.fixture
def renderer() -> HfRenderer:
    return SHARED


def sampled(renderer: HfRenderer, text: str) -> tuple[int, ...]:
    """Ids of a turn as the model would sample it when it writes as the template does."""
    return renderer.encode(text + "<|im_end|>")


TURN_TEXT = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2*3"}}\n</tool_call>'


def full_text(renderer: HfRenderer, messages: tuple[Message, ...]) -> str:
    return renderer.decode(renderer.render(messages, tools=[CALCULATOR]).ids)


@pytest.mark.parametrize(
    "answers",
    [
        (Message(role="tool", content="6", tool_call_id="call_0"),),
        (
            Message(role="tool", content="6", tool_call_id="call_0"),
            Message(role="tool", content="", tool_call_id="call_1"),
            Message(role="tool", content="\n seven \n", tool_call_id="call_2"),
        ),
        (Message(role="user", content="Are you sure?"),),
        (Message(role="user", content="\n<|im_start|> in the text é🙂"),),
    ],
)
def test_render_plus_sampled_plus_extend_is_the_full_render(
    renderer: HfRenderer, answers: tuple[Message, ...]
) -> None:
    prompt = renderer.render(TASK, tools=[CALCULATOR]).ids
    turn = sampled(renderer, TURN_TEXT)
    extension = renderer.extend((*prompt, *turn), answers, tools=[CALCULATOR]).ids
    # The template writes "<|im_start|>assistant\n" and the turn's text, as content.
    whole = (*TASK, Message(role="assistant", content=TURN_TEXT), *answers)
    assert (*prompt, *turn, *extension) == renderer.render(whole, tools=[CALCULATOR]).ids


texts = st.text(st.characters(codec="utf-8")) | st.sampled_from(
    ["treadle-boundary", "<|im_end|>", "\n", " ", "<tool_response>", "6"]
)


@settings(deadline=None, max_examples=60)
@given(st.lists(texts, min_size=1, max_size=3))
def test_any_tool_texts_extend_exactly(contents: list[str]) -> None:
    renderer = SHARED
    answers = tuple(Message(role="tool", content=content) for content in contents)
    ids = (*renderer.render(TASK, tools=[CALCULATOR]).ids, *sampled(renderer, TURN_TEXT))
    whole = (*TASK, Message(role="assistant", content=TURN_TEXT), *answers)
    extended = (*ids, *renderer.extend(ids, answers, tools=[CALCULATOR]).ids)
    assert extended == renderer.render(whole, tools=[CALCULATOR]).ids


def test_a_tool_that_holds_our_marker_is_refused(renderer: HfRenderer) -> None:
    tool = ToolSpec(name="x", description="treadle-boundary")
    with pytest.raises(RenderError, match="a tool's schema contains"):
        renderer.extend((0,), [Message(role="tool", content="6")], tools=[tool])


def test_the_newline_after_the_turn_is_there(renderer: HfRenderer) -> None:
    """Spec A3.9 #1, verl issue #6501: the boundary was one token short."""
    turn = sampled(renderer, TURN_TEXT)
    extension = renderer.extend(turn, [Message(role="tool", content="6")], tools=[CALCULATOR]).ids
    assert renderer.decode(extension).startswith("\n<|im_start|>user\n<tool_response>\n6\n")
    assert renderer.decode(extension).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_many_rounds_stay_exact(renderer: HfRenderer) -> None:
    ids = renderer.render(TASK, tools=[CALCULATOR]).ids
    messages: tuple[Message, ...] = TASK
    for turn in range(4):
        text = f"Step {turn}.\n{TURN_TEXT}"
        ids = (*ids, *sampled(renderer, text))
        answer = Message(role="tool", content=str(turn) * turn)
        ids = (*ids, *renderer.extend(ids, [answer], tools=[CALCULATOR]).ids)
        messages = (*messages, Message(role="assistant", content=text), answer)
        assert ids == renderer.render(messages, tools=[CALCULATOR]).ids


def test_a_turn_that_was_cut_is_closed_by_the_template(renderer: HfRenderer) -> None:
    prompt = renderer.render(TASK, tools=()).ids
    cut = renderer.encode("The answer is")
    extension = renderer.extend(
        (*prompt, *cut), [Message(role="user", content="Go on")], tools=()
    ).ids
    whole = (
        *TASK,
        Message(role="assistant", content="The answer is"),
        Message(role="user", content="Go on"),
    )
    assert (*prompt, *cut, *extension) == renderer.render(whole, tools=()).ids


@pytest.mark.parametrize("end", ["", "<|endoftext|>"])
def test_nothing_of_the_synthetic_call_follows_a_call_that_another_id_ended(
    renderer: HfRenderer, end: str
) -> None:
    answer = [Message(role="tool", content="6")]
    whole = renderer.extend(sampled(renderer, TURN_TEXT), answer, tools=[CALCULATOR]).ids
    ids = renderer.encode(TURN_TEXT + end)
    extension = renderer.extend(ids, answer, tools=[CALCULATOR]).ids
    assert extension == (*renderer.encode("<|im_end|>"), *whole)


@pytest.mark.parametrize(
    ("said", "closing"),
    [
        ("<think>\nFirst", "\n</think>\n\n"),
        ("<think>\nFirst\n", "</think>\n\n"),
        ("<think>\nFirst\n</th", "ink>\n\n"),
        ("<think>\nFirst <tool_call>", "\n</think>\n\n"),
        ("<think>\nFirst<|endoftext|>", "\n</think>\n\n"),
        ("<think>\nFirst\n</think>\n\nSix", ""),
        ("<think>\nFirst\n</think>\n\n<tool_call>\n{", "\n</tool_call>"),
        ("<think>\nFirst\n</think>\n\n" + TURN_TEXT, ""),
        ("Six", ""),
    ],
)
def test_what_a_turn_left_open_is_closed_as_the_template_closes_it(said: str, closing: str) -> None:
    content = "{%- if message.content %}"
    thought = (
        "{%- if message.reasoning_content %}{{- '\n<think>\n' + message.reasoning_content }}"
        "{{- '\n</think>\n' }}{%- endif %}{{- '\n' + message.content }}{%- if false %}"
    )
    place = TEMPLATE.index(content)
    template = TEMPLATE[:place] + thought + TEMPLATE[place + len(content) :]
    renderer = HfRenderer(make_tokenizer(template), parser="qwen3")
    asked = Message(role="user", content="What does <think> mean, and <tool_call>?")
    prompt = renderer.render([asked], tools=()).ids
    more = [Message(role="user", content="Go on")]
    ids = (*prompt, *renderer.encode(said))
    extension = renderer.decode(renderer.extend(ids, more, tools=()).ids)
    after = renderer.template.after_turn(more, ()).text
    assert extension == closing + after


def test_odd_sampled_ids_are_kept(renderer: HfRenderer) -> None:
    """Ids that no tokenizer would write (here byte by byte) survive; only the boundary is added."""
    turn = tuple(i for c in "assistant" for i in renderer.encode(c))
    assert turn != renderer.encode("assistant")
    extension = renderer.extend(turn, [Message(role="user", content="x")], tools=()).ids
    closed = renderer.extend(
        sampled(renderer, "assistant"), [Message(role="user", content="x")], tools=()
    ).ids
    assert extension[1:] == closed


@pytest.mark.parametrize("plain", [True, False], ids=["piece by piece", "whole"])
def test_a_conversation_is_rendered_again_as_it_was(plain: bool) -> None:
    tokenizer = make_tokenizer()
    if not plain:
        tokenizer.add_tokens([AddedToken("<odd>", lstrip=True)])
    renderer = HfRenderer(tokenizer)
    assert (renderer._pieces is not None) is plain
    answer = Message(role="tool", content="6", tool_call_id="call_0")
    prompt = renderer.render(TASK, tools=[CALCULATOR]).ids
    odd = tuple(i for c in TURN_TEXT for i in renderer.encode(c))  # no tokenizer writes it so
    turn = (*odd, *renderer.encode("<|im_end|>"))
    extension = renderer.extend((*prompt, *turn), [answer], tools=[CALCULATOR]).ids
    ids, start = (*prompt, *turn, *extension), len(prompt) + len(turn)
    for last in ("It is 6.", "6<|im_end|>"):
        said = (Message(role="assistant", content=TURN_TEXT), answer)
        messages = (*TASK, *said, Message(role="assistant", content=last))
        again = renderer.render_again(
            messages,
            tools=[CALCULATOR],
            ids=(*ids, *sampled(renderer, last)),
            written=[(0, len(prompt)), (start, len(ids))],
        )
        assert again == renderer.render(messages, tools=[CALCULATOR])
        assert again.ids[: len(ids)] != ids


def test_parse_gives_text_without_the_end_of_turn(renderer: HfRenderer) -> None:
    parsed = renderer.parse(sampled(renderer, "I compute.\n" + TURN_TEXT))
    assert parsed.message.content == "I compute."
    assert parsed.message.tool_calls == (CALL,)


def test_a_parser_sees_the_end_of_the_prompt_if_it_may_look_there() -> None:
    class Own(HermesParser):
        seen = ""

        def parse(self, text: str, **kwargs: Any) -> ParsedText:
            self.seen = kwargs.get("prompt_end", "")
            return super().parse(text, **kwargs)

    own = Own()
    HfRenderer(make_tokenizer(), parser=own).parse((0,), prompt=SHARED.encode("<think>\n"))
    assert own.seen == "<think>\n"
    thinking = HfRenderer(make_tokenizer(), parser="qwen3")
    parsed = thinking.parse(SHARED.encode("Hm.</think>6"), prompt=SHARED.encode("<think>\n"))
    assert (parsed.message.reasoning, parsed.message.content) == ("Hm.", "6")


def test_a_turn_that_ends_with_another_special_id_is_read_without_it(renderer: HfRenderer) -> None:
    assert renderer.parse(renderer.encode("#### 6<|endoftext|>")).message.content == "#### 6"


def test_tool_calls_of_given_messages_are_rendered(renderer: HfRenderer) -> None:
    messages = (*TASK, Message(role="assistant", content="", tool_calls=(CALL,)))
    assert TURN_TEXT in full_text(renderer, messages)


def test_from_directory_hashes_tokenizer_json(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    renderer = HfRenderer.from_directory(tmp_path)
    expected = hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).digest()
    assert renderer.tokenizer_sha256 == expected
    assert renderer.vocab_size == len(make_tokenizer())
    assert renderer.decode(renderer.stop_token_ids) == "<|im_end|>"


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"holds no tokenizer\.json"):
        HfRenderer.from_directory(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", '{"model": 3}', "[1"])
def test_a_tokenizer_that_does_not_load_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(SetupError, match=f"the tokenizer in {tmp_path} does not load: "):
        HfRenderer.from_directory(tmp_path)


def test_text_that_the_tokenizer_refuses_is_a_render_error(renderer: HfRenderer) -> None:
    with pytest.raises(RenderError, match="tokenizer: "):
        renderer.extend((0,), [Message(role="tool", content="half \ud83d")], tools=())


def test_a_missing_template_is_refused() -> None:
    with pytest.raises(SetupError, match="no chat template"):
        HfRenderer(make_tokenizer(template=None))


def test_a_template_whose_turns_end_in_plain_text_is_refused() -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(SetupError, match="no special token before the next message"):
        HfRenderer(make_tokenizer(plain))


def test_a_template_that_ends_a_turn_by_what_follows_is_refused() -> None:
    odd = (
        "{% for m in messages %}<|im_start|>{{ m.content }}"
        "{% if not loop.last and messages[loop.index0 + 1].content == 'odd' %}<|endoftext|>"
        "{% endif %}"
        "<|im_end|>{% endfor %}"
    )
    renderer = HfRenderer(make_tokenizer(odd))
    renderer.extend((0,), [Message(role="user", content="even")], tools=())
    with pytest.raises(RenderError, match="cannot be extended exactly"):
        renderer.extend((0,), [Message(role="user", content="odd")], tools=())


def test_a_template_that_raises_is_a_render_error() -> None:
    strict = "{% if messages | length > 3 %}{{ raise_exception('too many') }}{% endif %}" + TEMPLATE
    renderer = HfRenderer(make_tokenizer(strict))
    with pytest.raises(RenderError, match="too many"):
        renderer.extend((0,), [Message(role="user", content="x")] * 2, tools=())


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all texts that are encoded from now on."""
    lengths: list[int] = []
    encode = HfRenderer._encode

    def count(self: HfRenderer, text: str) -> tuple[int, ...]:
        lengths.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(HfRenderer, "_encode", count)
    return lengths


@given(st.text(max_size=20), st.sampled_from(["", "<|im_end|>", "<|im_start|>user\n"]))
def test_ids_and_texts_are_those_of_the_tokenizer(text: str, special: str) -> None:
    tokenizer = SHARED._tokenizer
    ids = tokenizer.encode(special + text, add_special_tokens=False)
    assert SHARED.encode(special + text) == tuple(ids)
    assert SHARED.decode(ids) == tokenizer.decode(
        ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def test_another_user_of_the_tokenizer_changes_no_ids() -> None:
    tokenizer = make_tokenizer()
    renderer = HfRenderer(tokenizer)
    ids = renderer.encode("user\n")
    tokenizer(["a", "user\n"], padding="max_length", truncation=True, max_length=3)
    assert renderer.encode("user\n") == ids


def test_a_tokenizer_with_an_encoding_of_its_own_keeps_it() -> None:
    class Loud(PreTrainedTokenizerFast):
        def encode(self, text: Any, *args: Any, **kwargs: Any) -> Any:
            return super().encode(text.upper(), *args, **kwargs)

    plain = make_tokenizer()
    loud = Loud(  # type: ignore[no-untyped-call]
        tokenizer_object=plain.backend_tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    loud.chat_template = plain.chat_template
    assert HfRenderer(loud).encode("be") == SHARED.encode("BE")


def test_a_text_that_cannot_fit_is_refused_after_its_first_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renderer = HfRenderer(make_tokenizer())
    lengths = recorded(monkeypatch)
    bounded = renderer.bounded(1000)
    pasted = Message(role="user", content="1 " * 500_000)
    said = r"65536 of them are \d+ tokens; 1000 fit"
    with pytest.raises(PromptTooLongError, match=said):
        bounded.render([pasted], tools=())
    with pytest.raises(PromptTooLongError, match=said):
        bounded.extend(renderer.encode("a<|im_end|>"), [pasted], tools=())
    assert sum(lengths) < 150_000


def test_a_bound_changes_no_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = HfRenderer(make_tokenizer())
    text = "assistant\n" * 2000  # many characters per token
    ids = renderer.encode(text)
    assert len(ids) * 4 < len(text)
    lengths = recorded(monkeypatch)
    assert renderer.bounded(len(ids)).encode(text) == ids
    assert lengths == [len(text)] * 2  # counted, then encoded
    assert renderer.bounded(len(text)).encode(text) == ids
    assert lengths == [len(text)] * 3


def test_a_prompt_that_opens_the_reasoning_hides_no_part_of_the_call() -> None:
    header = "<|im_start|>assistant\n"
    opens = TEMPLATE.replace(
        f"{{{{- '{header}' }}}}{{%- endif %}}\n", f"{{{{- '{header}<think>\n' }}}}{{%- endif %}}\n"
    )
    assert opens != TEMPLATE
    renderer = HfRenderer(make_tokenizer(opens))
    assert (renderer.template.probe_call or "").lstrip().startswith("<tool_call>")
    text = renderer.decode(renderer.render(TASK, tools=(CALCULATOR,)).ids)
    assert text.endswith(f"{header}<think>\n")


def test_a_template_whose_calls_no_parser_is_known_for_ends_the_start() -> None:
    """Granite 3.3: the system prompt asks for calls that the template itself never writes."""
    granite = (
        "{% for message in messages %}<|im_start|>{{ message.role + '\\n' + message.content }}"
        "{% if tools and loop.first %}Call with <|tool_call|>[{{ tools | tojson }}]{% endif %}"
        "<|im_end|>{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
    )
    renderer = HfRenderer(make_tokenizer(granite))
    renderer.render(TASK, tools=())
    with pytest.raises(SetupError, match=r"no parser is known .* speaks of <\|tool_call\|>"):
        renderer.render(TASK, tools=[CALCULATOR])
    HfRenderer(make_tokenizer(granite), parser="hermes").render(TASK, tools=[CALCULATOR])


def test_a_template_that_cannot_show_results_ends_the_start() -> None:
    """Kimi K2: its first template appends to a list, which the sandbox forbids."""
    kimi = TEMPLATE.replace("{%- elif message.role == 'tool' %}", "{%- elif false %}")
    renderer = HfRenderer(make_tokenizer(kimi))
    renderer.render(TASK, tools=())
    with pytest.raises(SetupError, match="cannot show what tools return"):
        renderer.render(TASK, tools=[CALCULATOR])
