"""Chats with images, against the processor that transformers makes of the same files."""

import io
import json
import struct
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from treadle.agent_loop import (
    Image,
    Message,
    RenderError,
    Role,
    SetupError,
    ToolCall,
    ToolSpec,
)
from treadle.agent_loop.hf.chat_renderer import HfRenderer
from treadle.agent_loop.hf.vision import ImagePlaceholders

PAD, START, STOP = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", START, STOP, PAD]
# Written for this test in the format of Qwen2.5-VL's template, with Qwen2.5's tools.
TEMPLATE = """\
{%- macro show(content) -%}
{%- if content is string %}{{- content }}
{%- else %}{%- for part in content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}{%- endif %}
{%- endmacro -%}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- show(messages[0].content) }}
{%- else %}{{- 'You are helpful.' }}{%- endif %}
{%- if tools %}{{- '\n# Tools' }}
{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}{%- endif %}
{{- '<|im_end|>\n' }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|im_start|>user\n' }}{{- show(message.content) }}{{- '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}{{- show(message.content) }}
{%- for call in message.tool_calls %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' }}{{- show(message.content) }}{{- '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
ZOOM = ToolSpec(name="zoom", description="Enlarges.")
CALL = ToolCall(id="call_0", name="zoom", arguments={"x": 1})
CALL_TEXT = '<tool_call>\n{"name": "zoom", "arguments": {"x": 1}}\n</tool_call>'


def image(width: int, height: int, *, kind: str = "PNG", **options: Any) -> Image:
    """A picture of noise."""
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, kind, **options)
    return Image(data=file.getvalue(), mime=f"image/{kind.lower()}")


WIDE, TALL, TINY = image(200, 61), image(90, 300, kind="JPEG"), image(9, 7, kind="WEBP")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with Qwen2.5-VL's special tokens, trained on a few lines."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIALS,
        show_progress=False,
    )
    lines = ["assistant\n", "user\n<tool_response>\n6\n</tool_response>", "What is this?"]
    backend.train_from_iterator(lines * 4, trainer)
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_image_processor() -> Any:
    kind: Any = Qwen2VLImageProcessorPil
    return kind(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 40})


TOKENIZER = make_tokenizer()
PAD_ID: int = TOKENIZER.convert_tokens_to_ids(PAD)  # type: ignore[assignment]


class Processor(Qwen2_5_VLProcessor):
    """The model family's own, without its part for videos, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: object) -> Any:
        return None


_KIND: Any = Processor  # Untyped in transformers.
PROCESSOR: Any = _KIND(image_processor=make_image_processor(), tokenizer=TOKENIZER)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    TOKENIZER.save_pretrained(path)
    make_image_processor().save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"image_token_id": PAD_ID}))
    return path


@pytest.fixture(scope="module")
def renderer(directory: Path) -> HfRenderer:
    return HfRenderer.from_directory(directory)


def expected(messages: Sequence[Message], *, open_turn: bool = True) -> tuple[int, ...]:
    """What the processor makes of a whole conversation."""
    chat = []
    for message in messages:
        entry: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.images:
            entry["content"] = [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
                for part in message.parts
            ]
        if message.tool_calls:
            entry["tool_calls"] = [
                {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in message.tool_calls
            ]
        chat.append(entry)
    text = TOKENIZER.apply_chat_template(
        chat, tools=[ZOOM.as_schema()], add_generation_prompt=open_turn, tokenize=False
    )
    opened = [PIL.Image.open(io.BytesIO(i.data)) for m in messages for i in m.images]
    return tuple(PROCESSOR(text=[text], images=opened or None)["input_ids"][0])


USER = Message(role="user", content="<image>What is this?", images=(WIDE,))
TURN = Message(role="assistant", content="", tool_calls=(CALL,))
CHATS: dict[str, tuple[Message, ...]] = {
    "one image": (USER,),
    "text only": (Message(role="user", content="What is <image>?"),),
    "images between texts": (
        Message(role="system", content="Look: <image>", images=(TINY,)),
        Message(role="user", content="a <image> b <image><image> c", images=(WIDE, TALL, WIDE)),
    ),
    "images before the text": (
        Message(role="user", content="Compare.", images=(TALL, TINY)),
        Message(role="assistant", content="They differ."),
        Message(role="user", content="", images=(WIDE,)),
    ),
    "images in tool results": (
        USER,
        TURN,
        Message(role="tool", content="enlarged", tool_call_id="call_0", images=(TALL,)),
        TURN,
        Message(role="tool", content="again <image>", tool_call_id="call_0", images=(TINY,)),
    ),
}


@pytest.mark.parametrize("name", CHATS)
def test_a_conversation_has_the_ids_of_the_processor(renderer: HfRenderer, name: str) -> None:
    messages = CHATS[name]
    rendering = renderer.render(messages, tools=[ZOOM])
    assert rendering.ids == expected(messages)
    assert [p.image for p in rendering.images] == [i for m in messages for i in m.images]
    for placed in rendering.images:
        assert set(rendering.ids[placed.start : placed.stop]) == {PAD_ID}
    assert rendering.ids.count(PAD_ID) == sum(p.num_tokens for p in rendering.images)


@pytest.mark.parametrize(
    "answers",
    [
        (Message(role="tool", content="enlarged", tool_call_id="call_0", images=(TALL,)),),
        (
            Message(role="tool", content="<image> and <image>", images=(TALL, TINY)),
            Message(role="tool", content="nothing"),
            Message(role="tool", content="", images=(WIDE,)),
        ),
        (Message(role="user", content="And now? <image>", images=(WIDE,)),),
        (Message(role="tool", content="only text"),),
    ],
)
def test_an_extension_goes_on_as_the_processor_would(
    renderer: HfRenderer, answers: tuple[Message, ...]
) -> None:
    prompt = renderer.render([USER], tools=[ZOOM])
    asks = TURN if answers[0].role == "tool" else Message(role="assistant", content="A line.")
    sampled = renderer.encode((CALL_TEXT if asks.tool_calls else "A line.") + "<|im_end|>")
    ids = prompt.ids + sampled
    extension = renderer.extend(ids, answers, tools=[ZOOM])
    assert ids + extension.ids == expected([USER, asks, *answers])
    assert [p.image for p in extension.images] == [i for m in answers for i in m.images]
    for placed in extension.images:
        assert set(extension.ids[placed.start : placed.stop]) == {PAD_ID}


SHARED = HfRenderer(
    TOKENIZER,
    placeholders=ImagePlaceholders(make_image_processor(), token=PAD, token_id=PAD_ID),
)
PARTS = st.lists(
    st.tuples(
        st.text(max_size=12).filter(str.isprintable),
        st.sampled_from([None, WIDE, TALL, TINY]),
    ),
    min_size=1,
    max_size=4,
)
Parts = Sequence[tuple[str, Image | None]]


def message_of(role: Role, parts: Parts) -> Message:
    images = tuple(shown for _, shown in parts if shown is not None)
    content = "".join(text + ("<image>" if shown is not None else "") for text, shown in parts)
    return Message(role=role, content=content, images=images)


@settings(max_examples=40)
@given(PARTS, st.lists(PARTS, min_size=1, max_size=3), st.booleans())
def test_any_conversation_goes_on_as_the_processor_would(
    asked: Parts, answered: Sequence[Parts], by_a_tool: bool
) -> None:
    question = message_of("user", asked)
    turn = TURN if by_a_tool else Message(role="assistant", content="A line.")
    said = CALL_TEXT if by_a_tool else "A line."
    answers = [message_of("tool" if by_a_tool else "user", parts) for parts in answered]
    prompt = SHARED.render([question], tools=[ZOOM])
    ids = prompt.ids + SHARED.encode(f"{said}<|im_end|>")
    rest = SHARED.extend(ids, answers, tools=[ZOOM], history=[question, turn])
    assert ids + rest.ids == expected([question, turn, *answers])
    placed = [*prompt.images, *(image.shifted(len(ids)) for image in rest.images)]
    assert [p.image for p in placed] == [i for m in (question, *answers) for i in m.images]
    for place in placed:
        assert set((ids + rest.ids)[place.start : place.stop]) == {PAD_ID}


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_an_image_that_lies_on_its_side_is_counted_upright(renderer: HfRenderer, kind: str) -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    turned = image(200, 61, kind=kind, exif=exif)
    message = Message(role="user", content="", images=(turned,))
    upright = Message(role="user", content="", images=(image(61, 200, kind=kind),))
    assert renderer.render([message], tools=()).ids == renderer.render([upright], tools=()).ids


def test_an_orientation_that_exif_does_not_know_is_none(renderer: HfRenderer) -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    known = exif.tobytes()
    entry = known.index(struct.pack(">HHI", 0x0112, 3, 1))
    text = known[: entry + 2] + struct.pack(">HI4s", 2, 2, b"6") + known[entry + 12 :]
    strange = image(200, 61, exif=text)
    assert PIL.Image.open(io.BytesIO(strange.data)).getexif()[0x0112] == "6"
    message = Message(role="user", content="", images=(strange,))
    upright = Message(role="user", content="", images=(image(200, 61),))
    assert renderer.render([message], tools=()).ids == renderer.render([upright], tools=()).ids


def test_no_pixel_is_decoded(renderer: HfRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = Image(data=WIDE.data[:200], mime=WIDE.mime)

    def refuse(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(PIL.Image.Image, "load", refuse)
    whole = renderer.render([USER], tools=())
    message = Message(role="user", content="<image>What is this?", images=(cut,))
    assert renderer.render([message], tools=()).ids == whole.ids


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Image(data=b"no image", mime="image/png"), r"an image/png image of 8 bytes: Unid"),
        (Image(data=TALL.data, mime="image/webp"), r"an image/webp image of \d+ bytes: Unid"),
        (image(2000, 2), "image/png image of .* aspect ratio must be smaller than 200"),
    ],
)
def test_an_image_that_cannot_be_counted_is_named(
    renderer: HfRenderer, bad: Image, message: str
) -> None:
    with pytest.raises(RenderError, match=message):
        renderer.render([Message(role="user", content="?", images=(bad,))], tools=())


def test_a_placeholder_in_a_text_with_images_is_plain_text(renderer: HfRenderer) -> None:
    shown = Message(role="user", content=f"{PAD} before <image> and {PAD}", images=(WIDE,))
    result = Message(role="tool", tool_call_id="0", name="zoom", content=f"a page with {PAD}")
    rendering = renderer.render([shown, result], tools=())
    (placed,) = rendering.images
    assert rendering.ids.count(PAD_ID) == placed.num_tokens
    assert set(rendering.ids[placed.start :][: placed.num_tokens]) == {PAD_ID}
    text = renderer.decode([i for i in rendering.ids if i != PAD_ID])
    assert f"{PAD} before {START}{STOP} and {PAD}" in text
    assert f"a page with {PAD}" in text
    alone = renderer.render([Message(role="user", content=f"a {PAD}")], tools=())
    assert alone.ids.count(PAD_ID) == 1 and not alone.images


def test_a_template_that_leaves_images_out_is_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("part.type == 'image'", "false").replace(
        "{{- part.text }}", "{{- part.text or '' }}"
    )
    placeholders = ImagePlaceholders(make_image_processor(), token=PAD, token_id=PAD_ID)
    with pytest.raises(RenderError, match=r"0 placeholders .* messages have 1"):
        HfRenderer(tokenizer, placeholders=placeholders).render([USER], tools=())


def test_a_text_model_takes_no_images() -> None:
    """Whatever its template does with parts: most add them to a text."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    said = r"messages\[0\], of role user, has images, and this model reads text only: send no"
    for renderer in (HfRenderer(TOKENIZER), HfRenderer(tokenizer)):
        for render in (
            partial(renderer.render, [USER], tools=()),
            partial(renderer.render_again, [USER], tools=(), ids=(), written=()),
            partial(renderer.extend, [1], [USER], tools=()),
        ):
            with pytest.raises(RenderError, match=said):
                render()


def test_chats_of_text_need_no_image_processor_that_fits(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"image_token_id": PAD_ID}))
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "SiglipImageProcessor"})
    )
    renderer = HfRenderer.from_directory(tmp_path)
    text = Message(role="user", content="What?")
    assert renderer.render([text], tools=[ZOOM]).ids == expected([text])
    with pytest.raises(RenderError, match=r"has images, and .*SiglipImage.* does not t"):
        renderer.render([USER], tools=[ZOOM])


def test_a_directory_that_does_not_name_the_placeholder_is_refused(tmp_path: Path) -> None:
    make_image_processor().save_pretrained(tmp_path)
    with pytest.raises(SetupError, match=r"neither its config\.json nor its tokenizer"):
        ImagePlaceholders.from_directory(tmp_path, TOKENIZER)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(SetupError, match=r"the image processor in .* does not load"):
        ImagePlaceholders.from_directory(tmp_path, TOKENIZER)


def test_another_family_of_image_processors_is_refused() -> None:
    with pytest.raises(SetupError, match="object does not tell how many ids an image takes"):
        ImagePlaceholders(object(), token=PAD, token_id=PAD_ID)
