import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from treadle.agent_loop import Message, Origin, Rendering, ToolCall, ToolSpec
from treadle.agent_loop.hf import HfRenderer
from treadle.tools import load_catalogue
from treadle.trainer.config.policy import OptimizerConfig, PolicyConfig
from treadle.trainer.policy.megatron.backend import MegatronPolicy
from treadle.trainer.sft import Demonstration, fine_tune, train_sequence, transcribe

_DEMO = Path(__file__).parent / "demo" / "calculator"
_RENDERER = HfRenderer.from_directory(_DEMO / "model")
_TOOL = load_catalogue(_DEMO / "tools.yaml")["calculator"].spec

_USER = Message(role="user", content="Q")
_ASSISTANT = Message(role="assistant", content="A")


def _said(demonstration: Demonstration) -> list[str]:
    tokens = transcribe(_RENDERER, demonstration)
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
    tokens = transcribe(_RENDERER, demonstration)
    masked = [i for i, sampled in zip(tokens.ids, tokens.loss_mask, strict=True) if sampled]
    assert _RENDERER.decode(masked) == "first<|im_end|>second<|im_end|>"
    assert _RENDERER.decode(tokens.prompt_ids).endswith("one<|im_end|>\n<|im_start|>assistant\n")


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
    tokens = transcribe(_RENDERER, demonstration)
    whole = _RENDERER.render(demonstration.messages, tools=demonstration.tools).ids
    assert whole[: len(tokens.ids)] == tokens.ids
    turns = sum(message.role == "assistant" for message in demonstration.messages)
    assert [span.origin for span in tokens.spans] == [
        Origin.PROMPT,
        *[Origin.SAMPLED, Origin.OBSERVED] * (turns - 1),
        Origin.SAMPLED,
    ]


def test_a_ledger_becomes_a_sequence_whose_advantage_is_its_mask() -> None:
    tokens = transcribe(_RENDERER, Demonstration(messages=(_USER, _ASSISTANT)))
    sequence = train_sequence(tokens)
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


def test_a_template_that_rewrites_history_is_refused() -> None:
    chat = Demonstration(messages=(_USER, _ASSISTANT, _USER, _ASSISTANT))
    with pytest.raises(ValueError, match="message 1 differently once 'A' follows"):
        transcribe(_Rewriting.from_directory(_DEMO / "model"), chat)


def test_a_template_without_the_stop_id_is_refused() -> None:
    renderer = HfRenderer.from_directory(_DEMO / "model")
    renderer.stop_token_ids = (0,)
    with pytest.raises(ValueError, match=r"none of the renderer's stop token ids \(0,\)"):
        transcribe(renderer, Demonstration(messages=(_USER, _ASSISTANT)))


@pytest.fixture
def policy(tmp_path: Path) -> Iterator[MegatronPolicy]:
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
    policy = MegatronPolicy(PolicyConfig(optimizer=OptimizerConfig(lr=1e-2)), tmp_path)
    yield policy
    policy.close()


def test_fine_tuning_lowers_the_loss_from_that_of_a_uniform_guess(policy: MegatronPolicy) -> None:
    rng = random.Random(0)
    sums = [_calculation(rng.randrange(100), rng.randrange(100)) for _ in range(4)]
    batch = [train_sequence(transcribe(_RENDERER, demonstration)) for demonstration in sums]
    losses = [stats.loss for stats in fine_tune(policy, [batch] * 12)]
    assert losses[0] == pytest.approx(6.93, abs=0.3)  # log 1024
    assert losses[-1] < losses[0] - 2
    assert policy.step == 12
