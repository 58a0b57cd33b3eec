import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from treadle.agent_loop import (
    AgentTask,
    LoopLimits,
    Message,
    Origin,
    Rendering,
    SamplingParams,
    Services,
    Tokens,
    ToolAgentLoop,
    ToolCall,
    ToolSpec,
)
from treadle.agent_loop.hf import HfRenderer
from treadle.agent_loop.testing import ScriptedGenerator
from treadle.policy.client.batch import token_weights
from treadle.policy.config.policy import OptimizerConfig, PolicyConfig
from treadle.policy.testing.fake.backend import FakePolicy
from treadle.tools import load_catalogue
from treadle.trainer import demo
from treadle.trainer.sft import Demonstration, fine_tune, train_sequences, transcribe

_DEMO = Path(demo.__file__).parent / "calculator"
_RENDERER = HfRenderer.from_directory(_DEMO / "model")
_TOOL = load_catalogue(_DEMO / "tools.yaml")["calculator"].spec

_USER = Message(role="user", content="Q")
_ASSISTANT = Message(role="assistant", content="A")


def _ledger(demonstration: Demonstration) -> Tokens:
    (tokens,) = transcribe(_RENDERER, demonstration)
    return tokens


def _said(demonstration: Demonstration) -> list[str]:
    tokens = _ledger(demonstration)
    return [
        _RENDERER.decode(tokens.ids[span.start : span.stop])
        for span in tokens.spans
        if span.origin is Origin.SAMPLED
    ]


def test_the_loss_is_on_assistant_turns_with_their_end_and_on_nothing_else() -> None:
    chat = (
        Message(role="system", content="S"),
        Message(role="user", content="one"),
        Message(role="assistant", content="first"),
        Message(role="user", content="two"),
        Message(role="assistant", content="second"),
    )
    demonstration = Demonstration(messages=chat)
    assert _said(demonstration) == ["first<|im_end|>", "second<|im_end|>"]
    tokens = _ledger(demonstration)
    masked = [i for i, sampled in zip(tokens.ids, tokens.loss_mask, strict=True) if sampled]
    assert _RENDERER.decode(masked) == "first<|im_end|>second<|im_end|>"
    assert _RENDERER.decode(tokens.prompt_ids).endswith("one<|im_end|>\n<|im_start|>assistant\n")
    half = Demonstration(messages=chat, unlearned=frozenset({2}))
    assert _said(half) == ["second<|im_end|>"]
    assert _ledger(half).ids == tokens.ids


def _calculation(
    a: int, b: int, *, system: bool = True, tools: bool = True, calls: bool = True
) -> Demonstration:
    """A sum, with or without the prompt of the rollout and a call of the calculator."""
    call = ToolCall(id="call-0", name=_TOOL.name, arguments={"expression": f"{a}+{b}"})
    said = (
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content=str(a + b), tool_call_id=call.id, name=_TOOL.name),
    )
    return Demonstration(
        messages=(
            *((Message(role="system", content="Solve the problem."),) if system else ()),
            Message(role="user", content=f"What is {a} + {b}?"),
            *(said if calls else ()),
            Message(role="assistant", content=f"#### {a + b}"),
        ),
        tools=(_TOOL,) if tools else (),
    )


_numbers = st.integers(0, 10**6)


@given(
    st.builds(
        _calculation,
        _numbers,
        _numbers,
        system=st.booleans(),
        tools=st.booleans(),
        calls=st.booleans(),
    )
)
def test_the_ledger_is_a_prefix_of_the_rendered_conversation(demonstration: Demonstration) -> None:
    tokens = _ledger(demonstration)
    whole = _RENDERER.render(demonstration.messages, tools=demonstration.tools).ids
    assert whole[: len(tokens.ids)] == tokens.ids
    turns = sum(message.role == "assistant" for message in demonstration.messages)
    assert [span.origin for span in tokens.spans] == [
        Origin.PROMPT,
        *[Origin.SAMPLED, Origin.OBSERVED] * (turns - 1),
        Origin.SAMPLED,
    ]


def test_a_ledger_becomes_a_sequence_whose_advantage_is_its_mask() -> None:
    tokens = _ledger(Demonstration(messages=(_USER, _ASSISTANT)))
    (sequence,) = train_sequences([tokens])
    assert sequence.ids == tokens.ids
    assert sequence.loss_mask == tokens.loss_mask
    assert sequence.advantages == tuple(map(float, tokens.loss_mask))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ((), "ends with an assistant's turn"),
        ((_USER,), "ends with an assistant's turn"),
        ((_ASSISTANT,), "answers another role's message"),
        ((_USER, _ASSISTANT, _ASSISTANT), "answers another role's message"),
    ],
)
def test_what_is_no_demonstration_is_refused(messages: tuple[Message, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Demonstration(messages=messages)


class _Rewriting(HfRenderer):
    """A template that drops the first message once there are three, as some drop reasoning."""

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSpec]) -> Rendering:
        kept = messages[1:] if len(messages) > 2 else messages
        return super().render(kept, tools=tools)


def test_a_turn_before_which_history_is_rewritten_has_a_ledger_of_its_own() -> None:
    said = [Message(role="assistant", content=text) for text in ("A", "B", "C")]
    chat = Demonstration(messages=(_USER, said[0], _USER, said[1], _USER, said[2]))
    renderer = _Rewriting.from_directory(_DEMO / "model")
    ledgers = transcribe(renderer, chat)
    texts = [
        "".join(
            f"[{text}]" if span.origin is Origin.SAMPLED else text
            for span in tokens.spans
            for text in [renderer.decode(tokens.ids[span.start : span.stop])]
        )
        for tokens in ledgers
    ]
    opened = "<|im_start|>assistant\n"
    question = f"<|im_start|>user\nQ<|im_end|>\n{opened}"
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"  # the template's own
    # Before the second turn the first message goes, and the ledger goes on from there.
    assert texts == [
        f"{system}{question}[A<|im_end|>]",
        f"{system}{opened}A<|im_end|>\n{question}[B<|im_end|>]\n{question}[C<|im_end|>]",
    ]
    sequences = train_sequences(ledgers, conversation=7)
    assert [sequence.trajectory for sequence in sequences] == [7, 7]
    assert token_weights(sequences, "seq-mean-token-mean") == [1 / 6] * 2


def test_a_turn_that_says_its_own_end_is_refused() -> None:
    chat = Demonstration(messages=(_USER, Message(role="assistant", content="one<|im_end|>two")))
    with pytest.raises(ValueError, match=r"message 1 contains '<\|im_end\|>', which ends a turn"):
        transcribe(_RENDERER, chat)


def _turn(*expressions: str, name: str = "calculator", content: str = "") -> Demonstration:
    calls = tuple(
        ToolCall(id=f"call-{number}", name=name, arguments={"expression": expression})
        for number, expression in enumerate(expressions)
    )
    said = Message(role="assistant", content=content, tool_calls=calls)
    return Demonstration(messages=(_USER, said), tools=(_TOOL,))


@pytest.mark.parametrize(
    "demonstration",
    [_turn("1<|im_end|>+1", "2+2"), replace(_turn("1", name="calc<|im_end|>"), tools=())],
    ids=["arguments", "name"],
)
def test_a_call_that_says_the_end_of_its_turn_is_refused(demonstration: Demonstration) -> None:
    with pytest.raises(
        ValueError, match=r"message 1 contains '<\|im_end\|>', which ends a turn, in its call 'calc"
    ):
        transcribe(_RENDERER, demonstration)


def _with_template(tmp_path: Path, template: str) -> HfRenderer:
    folder = tmp_path / "model"
    shutil.copytree(_DEMO / "model", folder)
    (folder / "chat_template.jinja").write_text(template)
    return HfRenderer.from_directory(folder)


_WITHOUT_CALLS = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
_FIRST_CALL = _WITHOUT_CALLS.replace(
    "{{ message.content }}<|im_end|>",
    "{{ message.content }}{% if message.tool_calls %}<tool_call>\n"
    "{{ message.tool_calls[0].function | tojson }}\n</tool_call>{% endif %}<|im_end|>",
)


def test_a_call_that_the_template_leaves_out_is_refused(tmp_path: Path) -> None:
    # The text has the tool's name: it is the call that is missing.
    chat = replace(_turn("1+1", content="let me use the calculator"), tools=())
    with pytest.raises(
        ValueError, match=r"message 1 has the calls calculator .*1\+1.*the parser reads none: "
    ):
        transcribe(_with_template(tmp_path, _WITHOUT_CALLS), chat)


def test_a_second_call_that_the_template_leaves_out_is_refused(tmp_path: Path) -> None:
    renderer = _with_template(tmp_path, _FIRST_CALL)
    one, two = (replace(_turn(*each), tools=()) for each in (["1+1"], ["1+1", "2+2"]))
    assert len(transcribe(renderer, one)) == 1
    with pytest.raises(
        ValueError, match=r"the parser reads calculator \{\"expression\": \"1\+1\"\}:"
    ):
        transcribe(renderer, two)


@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "expression"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text('a3 \n"{}<>e\u0301', max_size=6),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.just("k"), inner),
            max_leaves=4,
        ),
    )
)
def test_calls_with_any_arguments_are_taken_as_they_are(arguments: dict[str, object]) -> None:
    call = ToolCall(id="call-0", name=_TOOL.name, arguments=arguments)
    said = Message(role="assistant", content="", tool_calls=(call, call))
    (text,) = _said(Demonstration(messages=(_USER, said), tools=(_TOOL,)))
    bodies = text.split("<tool_call>\n")[1:]
    read = [json.loads(body.split("\n</tool_call>")[0])["arguments"] for body in bodies]
    assert read == [arguments] * 2


@pytest.mark.asyncio
async def test_the_ids_are_those_of_a_rollout_in_which_the_model_said_the_same() -> None:
    """The agent loop renders, extends and calls the real tool; only what is said is given."""
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3*4"}}\n</tool_call>'
    texts = [f"{call}<|im_end|>", f"{call}<|im_end|>", "It is so.\n#### 12<|im_end|>"]
    generator = ScriptedGenerator([_RENDERER.encode(text) for text in texts])
    tools = load_catalogue(_DEMO / "tools.yaml")
    services = Services(
        generator=generator,
        renderer=_RENDERER,
        sampling=SamplingParams(max_tokens=200),
        tools=tools,
        limits=LoopLimits(max_response_tokens=1000, max_context_tokens=2000),
    )
    asked = (
        Message(role="system", content="Solve it."),
        Message(role="user", content="What is 3 times 4?"),
    )
    task = AgentTask(
        task_id="t", sample_index=0, rollout_index=0, loop="tool_agent", messages=asked, fields={}
    )
    rollout = await ToolAgentLoop().run(task, services)
    assert [message.role for message in rollout.messages[2:]] == [
        *("assistant", "tool") * 2,
        "assistant",
    ]
    (sampled,) = rollout.samples
    shown = Demonstration(messages=rollout.messages, tools=(_TOOL,))
    ledger = _ledger(shown)
    assert ledger.ids == sampled.ids
    assert ledger.loss_mask == sampled.loss_mask
    assert [(s.origin, s.start, s.stop) for s in ledger.spans] == [
        (s.origin, s.start, s.stop) for s in sampled.spans
    ]


def test_a_template_without_the_stop_id_is_refused() -> None:
    renderer = HfRenderer.from_directory(_DEMO / "model")
    renderer.stop_token_ids = (0,)
    with pytest.raises(ValueError, match=r"none of the renderer's stop token ids \(0,\)"):
        transcribe(renderer, Demonstration(messages=(_USER, _ASSISTANT)))


@pytest.fixture
def policy(tmp_path: Path) -> FakePolicy:
    config = Qwen2Config(
        vocab_size=_RENDERER.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    return FakePolicy(PolicyConfig(optimizer=OptimizerConfig(lr=1e-2)), tmp_path)


def test_fine_tuning_lowers_the_loss_from_that_of_a_uniform_guess(policy: FakePolicy) -> None:
    rng = random.Random(0)
    sums = [_calculation(rng.randrange(100), rng.randrange(100)) for _ in range(4)]
    batch = [each for d in sums for each in train_sequences(transcribe(_RENDERER, d))]
    losses = [stats.loss for stats in fine_tune(policy, [batch] * 12)]
    assert losses[0] == pytest.approx(6.93, abs=0.3)  # log 1024
    assert losses[-1] < losses[0] - 2
    assert policy.step == 12
