from pathlib import Path

import pytest

from treadle.agent_loop import Image, Message
from treadle.trainer.data.images import row_messages
from treadle.trainer.data.row import Row

PNG, JPEG, WEBP = b"\x89PNG\r\n\x1a\n.", b"\xff\xd8\xff.", b"RIFF\0\0\0\0WEBP."
FIRST, SECOND = Image(data=PNG, mime="image/png"), Image(data=JPEG, mime="image/jpeg")


def row(*contents: object, images: object) -> Row:
    roles = ("user", "assistant", "user")
    prompt = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return Row(index=0, place="a.jsonl", columns={"prompt": prompt, "images": images})


def test_images_go_to_their_marks_in_order() -> None:
    given = [{"bytes": PNG, "path": None}, {"bytes": JPEG, "path": "of the publisher.jpg"}]
    assert row_messages(row("<image>First.", "Yes.", "And <image>?", images=given)) == (
        Message(role="user", content="<image>First.", images=(FIRST,)),
        Message(role="assistant", content="Yes."),
        Message(role="user", content="And <image>?", images=(SECOND,)),
    )


def test_without_marks_they_come_before_the_first_text_of_the_user() -> None:
    (message,) = row_messages(row("See.", images=[{"bytes": WEBP}]))
    assert message.parts == (Image(data=WEBP, mime="image/webp"), "See.")


@pytest.mark.parametrize("images", [None, [], ()])
def test_a_mark_without_images_is_text(images: object) -> None:
    assert row_messages(row("<image>", images=images)) == (Message(role="user", content="<image>"),)


def test_an_image_may_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(PNG)
    (message,) = row_messages(row("See.", images=[{"path": str(file)}]))
    assert message.images == (FIRST,)


@pytest.mark.parametrize(
    ("contents", "images", "says"),
    [
        (("See.",), "a.png", "must be a list, got 'a.png'"),
        (("See.",), [PNG], r"images\[0\] must be a mapping with the bytes"),
        (("See.",), [{"bytes": PNG}, {"bytes": None}], r"images\[1\] must be a mapping"),
        (("See.",), [{"bytes": b"GIF89a"}], "begins with b'GIF89a': it is none of PNG, JPEG"),
        (("See.",), [{"path": "/nowhere.png"}], "cannot read /nowhere.png: No such file"),
        (("<image><image>",), [{"bytes": PNG}], "has 2 <image> marks for 1 images"),
        (("See.", "<image>"), [{"bytes": PNG}], "assistant message cannot carry images"),
    ],
)
def test_what_cannot_be_shown_is_an_error(
    contents: tuple[str, ...], images: object, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        row_messages(row(*contents, images=images))


def test_a_prompt_without_a_user_shows_no_image() -> None:
    columns = {"prompt": [{"role": "system", "content": "x"}], "images": [{"bytes": PNG}]}
    with pytest.raises(ValueError, match="no message of the user"):
        row_messages(Row(index=0, place="a.jsonl", columns=columns))


def test_a_part_of_a_content_may_stand_for_an_image() -> None:
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "See."}]
    (message,) = row_messages(row(parts, images=[{"bytes": PNG}]))
    assert message.parts == (FIRST, "See.")
    with pytest.raises(ValueError, match=r"prompt\[0\].content\[0\] must be .* or .*has the image"):
        row_messages(row(parts, images=[]))
