"""Tests of what is found out about chat templates, with a small template of each kind.

The templates are written for this test, each in the manner of a family of public ones.
"""

import itertools
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from treadle.agent_loop import Message, RenderError, SetupError, ToolCall, ToolSpec
from treadle.agent_loop.hf.chat_renderer import HfRenderer
from treadle.agent_loop.hf.template import MessageForm

TOKENS = ["<pad>", "<eos>", "<|user|>", "<|model|>", "<|tool|>", "<|sys|>", "<|end|>", "<|close|>"]
TOKENS += ["<|return|>", "<|call|>", "<think>", "</think>"]
TOOL = ToolSpec(name="calc", description="Evaluates.")
SYSTEM = Message(role="system", content="Be brief.")
ASK = Message(role="user", content="2*3?")
MORE = Message(role="user", content="And e\u0301, \u212b?")  # not composed
SAYS = Message(role="assistant", content="I compute.")


def calls(*numbers: int) -> Message:
    made = (ToolCall(id=f"call_{n}", name="calc", arguments={"text": str(n)}) for n in numbers)
    return Message(role="assistant", content="", tool_calls=tuple(made))


def results(*numbers: int) -> tuple[Message, ...]:
    return tuple(
        Message(role="tool", content=f"r{n}", tool_call_id=f"call_{n}", name="calc")
        for n in numbers
    )


def make_tokenizer(template: str, *, eos: str = "<eos>") -> PreTrainedTokenizerFast:
    """One id per byte, and one per special token; a space between lines of the template is none."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token=eos, pad_token="<pad>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    tokenizer.chat_template = "".join(line.strip() for line in template.splitlines())
    return tokenizer


def renderer_of(template: str, *, eos: str = "<eos>") -> HfRenderer:
    renderer = HfRenderer(make_tokenizer(template, eos=eos))
    # These templates show no tools, and write calls that no parser reads.
    renderer.template.shows_tools, renderer._tool_problem = True, None
    return renderer


def assert_exact(renderer: HfRenderer, messages: tuple[Message, ...], *turns: str) -> None:
    """Renders turn by turn, the model writing `turns`, and compares with the whole each time."""
    places = [i for i, message in enumerate(messages) if message.role == "assistant"]
    ids = renderer.render(messages[: places[0]], tools=[TOOL]).ids
    for (place, stop), turn in zip(
        itertools.pairwise((*places, len(messages))), turns, strict=True
    ):
        ids = (*ids, *renderer.encode(turn))
        answers, history = messages[place + 1 : stop], messages[: place + 1]
        ids = (*ids, *renderer.extend(ids, answers, tools=[TOOL], history=history).ids)
        whole = renderer.render(messages[:stop], tools=[TOOL]).ids
        assert renderer.decode(ids) == renderer.decode(whole)
        assert ids == whole


def stops(renderer: HfRenderer) -> list[str]:
    return [renderer.decode([i]) for i in renderer.stop_token_ids]


PLAIN = """
{% for m in messages %}
  {% if m.role == 'assistant' %}
    <|model|>{{ m.content }}
    {% for c in m.tool_calls %}[{{ c.function.arguments | tojson }}]{% endfor %}<|end|>{{ '\\n' }}
  {% elif m.role == 'tool' %}
    {% if loop.previtem.role != 'tool' %}<|tool|>{% endif %}({{ m.content }})
    {% if loop.last or loop.nextitem.role != 'tool' %}<|end|>{{ '\\n' }}{% endif %}
  {% else %}<|{{ m.role | replace('system', 'sys') }}|>{{ m.content }}<|end|>{{ '\\n' }}
  {% endif %}
{% endfor %}
{% if add_generation_prompt %}<|model|>{% endif %}
"""


def test_parallel_results_are_one_group() -> None:
    assert_exact(
        renderer_of(PLAIN),
        (SYSTEM, ASK, calls(1, 2), *results(1, 2), SAYS, MORE, calls(3), *results(3)),
        '[{"text": "1"}][{"text": "2"}]<|end|>',
        "I compute.<|end|>",
        '[{"text": "3"}]<|end|>',
    )


# The way of gpt-oss: the last turn ends with <|return|>, which becomes <|end|> once it is past;
# a call ends with a token of its own, and only the first is written.
REPLACED = """
{% for m in messages %}
  {% if m.tool_calls %}<|model|>to={{ m.tool_calls[0].function.name }}
    {{ m.tool_calls[0].function.arguments | tojson }}<|call|>
  {% elif m.role == 'assistant' %}<|model|>{{ m.content }}
    {{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
  {% else %}<|{{ m.role | replace('system', 'sys') }}|>{{ m.content }}<|end|>
  {% endif %}
{% endfor %}
{% if add_generation_prompt %}<|model|>{% endif %}
"""


def test_a_call_may_end_with_a_token_of_its_own() -> None:
    renderer = renderer_of(REPLACED, eos="<|return|>")
    assert stops(renderer) == ["<|return|>", "<|call|>"]  # <|end|> does not stop the model
    assert_exact(renderer, (ASK, calls(1, 2), *results(1, 2)), 'to=calc{"text": "1"}<|call|>')


def test_an_end_that_is_replaced_later_counts_as_the_end() -> None:
    renderer = renderer_of(REPLACED, eos="<|return|>")
    ids = renderer.encode("<|user|>2*3?<|end|><|model|>6<|return|>")
    new = renderer.extend(ids, [MORE], tools=())
    assert renderer.decode(new.ids).startswith("<|user|>And")
    cut = renderer.extend(ids[:-1], [MORE], tools=())
    assert renderer.decode(cut.ids).startswith("<|end|><|user|>And")


# The way of GLM: a turn has no end, the next header is one.
IMPLIED = """
{% for m in messages %}
  {% if m.role == 'assistant' %}<|model|>{{ m.content }}
    {% for c in m.tool_calls %}<|call|>{{ c.function.arguments | tojson }}<|close|>{% endfor %}
  {% elif m.role == 'tool' %}
    {% if loop.previtem.role != 'tool' %}<|tool|>{% endif %}({{ m.content }})
  {% else %}<|user|>{{ m.content }}
  {% endif %}
{% endfor %}
{% if add_generation_prompt %}<|model|>{% endif %}
"""


def test_the_next_header_may_end_a_turn() -> None:
    renderer = renderer_of(IMPLIED)
    assert stops(renderer) == ["<|user|>", "<|tool|>", "<eos>"]
    assert_exact(
        renderer,
        (ASK, SAYS, MORE, calls(1, 2), *results(1, 2), SAYS, ASK),
        "I compute.<|user|>",
        '<|call|>{"text": "1"}<|close|><|call|>{"text": "2"}<|close|><|tool|>',
        "I compute.<|user|>",
    )


def test_a_header_that_was_not_sampled_is_written() -> None:
    renderer = renderer_of(IMPLIED)
    for turn in ("6", "6<eos>", "6<|tool|>"):
        new = renderer.extend(renderer.encode(turn), [MORE], tools=())
        assert renderer.decode(new.ids).startswith("<|user|>And")


# The way of Cohere: results are numbered over the conversation, found by the call's id.
NUMBERED = """
{% set ns = namespace(ids=[]) %}
{% for m in messages %}
  {% if m.role == 'assistant' %}<|model|>{{ m.content }}
    {% for c in m.tool_calls %}
      {% set ns.ids = ns.ids + [c.id] %}{{ ns.ids | length - 1 }}{{ c.function.arguments | tojson }}
    {% endfor %}<|close|><|end|>
  {% elif m.role == 'tool' %}<|tool|>{{ ns.ids.index(m.tool_call_id) }}:{{ m.content }}<|end|>
  {% else %}<|user|>{{ m.content }}<|end|>
  {% endif %}
{% endfor %}
{% if add_generation_prompt %}<|model|>{% endif %}
"""


def test_results_that_are_numbered_over_the_conversation() -> None:
    assert_exact(
        renderer_of(NUMBERED),
        (ASK, calls(1, 2), *results(1, 2), calls(3), *results(3)),
        '0{"text": "1"}1{"text": "2"}<|close|><|end|>',
        '2{"text": "3"}<|close|><|end|>',
    )


def test_the_end_may_come_behind_other_tokens() -> None:
    """Also when the turn was cut: then what closes it is written too."""
    renderer = renderer_of(NUMBERED)
    cut = renderer.extend(renderer.encode("6"), [MORE], tools=())
    assert renderer.decode(cut.ids).startswith("<|close|><|end|><|user|>And")
    assert stops(renderer) == ["<|end|>", "<eos>"]


# The way of Mistral: no headers, roles that alternate, ids of nine characters, and the system's
# text before the last user's.
STRICT = """
{% for m in messages %}
  {% if m.role == 'user' %}<|user|>
    {% set asked = messages | selectattr('role', 'equalto', 'user') | list %}
    {% if m == asked[-1] and messages[0].role == 'system' %}{{ messages[0].content + ' ' }}
    {% endif %}{{ m.content }}<|model|>
  {% elif m.tool_calls %}
    {% for c in m.tool_calls %}
      {% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
      <|call|>{{ c.id }}{{ c.function.arguments | tojson }}
    {% endfor %}<eos>
  {% elif m.role == 'tool' %}<|tool|>{{ m.tool_call_id }}:{{ m.content }}<|close|>
  {% elif m.role == 'assistant' %}{{ m.content }}<eos>
  {% endif %}
{% endfor %}
"""


def test_ids_get_nine_characters_where_the_template_insists() -> None:
    renderer = renderer_of(STRICT)
    made, answer = MessageForm(nine_character_ids=True), results(1)[0]
    entry = made.as_dict(answer)
    name = entry["tool_call_id"]
    assert renderer.template.form == made and isinstance(name, str) and len(name) == 9
    assert made.as_dict(Message(role="tool", content="", tool_call_id="abcdefGH1")) == {
        "role": "tool",
        "content": "",
        "tool_call_id": "abcdefGH1",
    }
    turn = f'<|call|>{name}{{"text": "1"}}<eos>'
    assert_exact(renderer, (SYSTEM, ASK, calls(1), answer), turn)


def test_the_system_message_is_repeated_where_the_template_repeats_it() -> None:
    renderer = renderer_of(STRICT)
    history = (SYSTEM, ASK, SAYS)
    ids = renderer.encode("I compute.<eos>")
    with_system = renderer.extend(ids, [ASK], tools=(), history=history).ids
    assert renderer.decode(with_system) == "<|user|>Be brief. 2*3?<|model|>"
    without = renderer.extend(ids, [ASK], tools=(), history=history[1:]).ids
    assert renderer.decode(without) == "<|user|>2*3?<|model|>"


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (PLAIN.replace("{{ m.content }}", "{{ m.content[0].text }}"), MessageForm(parts=True)),
        (
            PLAIN.replace("arguments | tojson", "arguments.strip()"),
            MessageForm(arguments_as_text=True),
        ),
    ],
)
def test_the_form_of_messages_is_found(template: str, form: MessageForm) -> None:
    renderer = renderer_of(template)
    assert renderer.template.form == form
    turn = '[{"text": "1"}]<|end|>'
    assert_exact(renderer, (ASK, calls(1), *results(1)), turn)


THINKING = PLAIN.replace(
    "<|model|>{{ m.content }}",
    "<|model|>{% if loop.last or loop.nextitem.role == 'tool' %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}",
).replace("%}<|model|>{% endif", "%}<|model|><think>{% endif")


def test_an_extension_is_exact_where_the_past_is_rewritten() -> None:
    """The reasoning of earlier turns leaves the template's text; what was sampled stays."""
    renderer = renderer_of(THINKING)
    turn = Message(role="assistant", content="6", reasoning="easy")
    prompt = renderer.render([ASK], tools=()).ids
    ids = (*prompt, *renderer.encode("easy</think>6<|end|>"))
    new = renderer.extend(ids, [MORE], tools=(), history=[ASK, turn]).ids
    whole = renderer.render([ASK, turn, MORE], tools=()).ids
    assert whole[-len(new) :] == new
    assert renderer.decode((*ids, *new)).count("easy") == 1
    assert renderer.decode(whole).count("easy") == 0


texts = st.text(st.characters(codec="utf-8")) | st.sampled_from(["treadle-boundary", *TOKENS, "\n"])
KINDS = [
    (renderer_of(PLAIN), "<|end|>"),
    (renderer_of(IMPLIED), "<|user|>"),
    (renderer_of(NUMBERED), "<|close|><|end|>"),
    (renderer_of(STRICT), "<eos>"),
]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(KINDS), texts, st.lists(texts, min_size=1, max_size=3))
def test_any_texts_extend_exactly(
    kind: tuple[HfRenderer, str], said: str, answers: list[str]
) -> None:
    """Apart from the turn: a template may write it in another way once it is past."""
    renderer, end = kind
    messages = tuple(Message(role="user", content=text) for text in answers)
    history = (ASK, Message(role="assistant", content=said))
    new = renderer.extend(renderer.encode(said + end), messages, tools=(), history=history).ids
    whole = renderer.render((*history, *messages), tools=()).ids
    assert whole[-len(new) :] == new
    assert renderer.decode(whole[: -len(new)]).endswith(said + end)


def test_a_template_without_results_says_so() -> None:
    renderer = renderer_of(PLAIN.replace("({{ m.content }})", ""))
    assert renderer.template.tool_problem == "it leaves out a message of role 'tool'"
    with pytest.raises(RenderError, match="shows no results: it leaves out a message of role"):
        renderer.extend((0,), results(1), tools=[TOOL])


def test_a_template_without_calls_gets_them_in_the_content() -> None:
    renderer = renderer_of(PLAIN.replace("[{{ c.function.arguments | tojson }}]", ""))
    assert renderer.template.probe_call is None
    said = Message(role="assistant", content="calc(1)")
    assert_exact(renderer, (ASK, said, *results(1, 2)), "calc(1)<|end|>")


def test_a_result_without_an_id_gets_one() -> None:
    """As the answer to a call that cannot be read."""
    renderer = renderer_of(NUMBERED)
    new = renderer.extend(
        renderer.encode("<|end|>"), [Message(role="tool", content="what?")], tools=[TOOL]
    )
    assert renderer.decode(new.ids) == "<|tool|>0:what?<|end|><|model|>"


def test_arguments_of_the_template_are_used_or_refused() -> None:
    tokenizer = make_tokenizer(
        PLAIN.replace("%}<|model|>{% endif", "%}<|model|>{{ mood }}{% endif")
    )
    renderer = HfRenderer(tokenizer, template_kwargs={"mood": "calm"})
    assert renderer.decode(renderer.render([ASK], tools=()).ids).endswith("<|model|>calm")
    with pytest.raises(SetupError, match="does not use 'moods', a template_kwarg"):
        HfRenderer(tokenizer, template_kwargs={"moods": "calm"})


class _Schema(dict[str, object]):
    """A schema that tells when nothing holds it any more."""


def test_of_tools_as_long_as_a_request_only_the_latest_are_kept() -> None:
    def render(*, length: int) -> "weakref.ref[_Schema]":
        schema = _Schema(type="object", description="x" * length)
        renderer.render([ASK], tools=[ToolSpec(name="calc", description="", parameters=schema)])
        return weakref.ref(schema)

    renderer = renderer_of(PLAIN)
    short, long, longest = render(length=10), render(length=1 << 18), render(length=1 << 19)
    assert long() is None
    assert longest() is not None
    last = render(length=10)
    assert longest() is None
    assert short() is not None
    assert last() is not None


def test_a_system_message_that_holds_our_marker_is_refused() -> None:
    odd = Message(role="system", content="treadle-boundary")
    with pytest.raises(RenderError, match="a system message contains"):
        renderer_of(PLAIN).extend((0,), [ASK], tools=(), history=[odd, ASK, SAYS])


def test_a_template_that_drops_the_tools_is_refused_where_there_are_tools() -> None:
    renderer = HfRenderer(make_tokenizer(PLAIN), parser="hermes")
    renderer.render([ASK], tools=())
    with pytest.raises(SetupError, match=r"does not show tools to the model: \['calc'\] would be"):
        renderer.render([ASK], tools=[TOOL])


def test_a_parser_of_another_family_is_refused_where_there_are_tools() -> None:
    renderer = HfRenderer(make_tokenizer(PLAIN), parser="hermes")
    renderer.template.shows_tools = True
    renderer.render([ASK], tools=())
    with pytest.raises(SetupError, match=r"a call as '\[.*the parser does not read; it asks for"):
        renderer.render([ASK], tools=[TOOL])


HERMES = """
{% if tools %}{{ tools | tojson }}{% endif %}
{% for m in messages %}<|{{ m.role | replace('assistant', 'model') }}|>
  {{ m.content }}
  {% for c in m.tool_calls %}
    <tool_call>{"name": "{{ c.function.name }}", "arguments":
    {{ c.function.arguments | tojson }}}</tool_call>
  {% endfor %}<|end|>
{% endfor %}
{% if add_generation_prompt %}<|model|>{% endif %}
"""


def test_a_missing_parser_is_the_one_that_the_template_asks_for() -> None:
    HfRenderer(make_tokenizer(HERMES)).render([ASK], tools=[TOOL])
    with pytest.raises(SetupError, match="it asks for the parser hermes or qwen3"):
        HfRenderer(make_tokenizer(HERMES), parser="mistral").render([ASK], tools=[TOOL])


def test_a_parser_whose_stop_tokens_are_unknown_is_refused() -> None:
    with pytest.raises(SetupError, match=r"end with '<\|eom_id\|>', .* the parser hermes or qwen3"):
        HfRenderer(make_tokenizer(HERMES), parser="llama3_json")


def test_reasoning_is_read_with_the_end_of_the_prompt() -> None:
    renderer = HfRenderer(make_tokenizer(THINKING), parser="qwen3")
    prompt = renderer.render([ASK], tools=()).ids
    message = renderer.parse(renderer.encode("easy</think>6<|end|>"), prompt=prompt).message
    assert (message.reasoning, message.content) == ("easy", "6")
    cut = renderer.parse(renderer.encode("still thinking"), prompt=prompt).message
    assert (cut.reasoning, cut.content) == ("still thinking", "")


def test_only_the_id_that_ended_the_turn_is_left_out_of_its_text() -> None:
    renderer = renderer_of(PLAIN)
    assert renderer.parse(renderer.encode("6<|close|><|end|>")).message.content == "6<|close|>"
