"""Questions about drawings: how many shapes, which shape, and which colour.

Invariant: a drawing and its question follow from the random generator alone, and every question has
one right answer. All shapes of a drawing have the same form and colour, and each lies in a cell of
its own, so none hides another.
"""

import io
import random
from dataclasses import dataclass
from typing import Final

from PIL import Image, ImageDraw

__all__ = ["ANSWERS", "SIDE", "Question", "draw"]

CELL: Final = 28
"""Height and width of a cell in pixels: what Qwen2.5-VL reads as one token."""

CELLS: Final = 3
SIDE: Final = CELL * CELLS
"""Height and width of a drawing, in pixels."""

_COLOURS: Final = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 119, 180),
    "black": (20, 20, 20),
}
_FORMS: Final = ("circle", "square", "triangle")
_MAX_SHAPES: Final = 4

ANSWERS: Final = {
    "How many shapes are there?": tuple(str(count + 1) for count in range(_MAX_SHAPES)),
    "Which shape is it?": _FORMS,
    "Which colour is it?": tuple(_COLOURS),
}
"""Question -> its possible answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question about a drawing.

    Attributes:
        text: One of `ANSWERS`.
        answer: The right answer.
        png: The drawing, as the bytes of a PNG file of `SIDE` by `SIDE` pixels.
    """

    text: str
    answer: str
    png: bytes


def draw(rng: random.Random) -> Question:
    """Draws shapes and asks about them."""
    count = rng.randint(1, _MAX_SHAPES)
    form, colour = rng.choice(_FORMS), rng.choice(tuple(_COLOURS))
    image = Image.new("RGB", (SIDE, SIDE), (255, 255, 255))
    pen = ImageDraw.Draw(image)
    for cell in rng.sample(range(CELLS * CELLS), count):
        size = rng.randint(CELL // 2, CELL - 6)
        left = cell % CELLS * CELL + rng.randint(2, CELL - size - 2)
        top = cell // CELLS * CELL + rng.randint(2, CELL - size - 2)
        _shape(pen, form, (left, top, left + size, top + size), _COLOURS[colour])
    file = io.BytesIO()
    image.save(file, "PNG")
    text = rng.choice(tuple(ANSWERS))
    answers = dict(zip(ANSWERS, (str(count), form, colour), strict=True))
    return Question(text=text, answer=answers[text], png=file.getvalue())


def _shape(
    pen: ImageDraw.ImageDraw,
    form: str,
    box: tuple[int, int, int, int],
    colour: tuple[int, int, int],
) -> None:
    left, top, right, bottom = box
    if form == "circle":
        pen.ellipse(box, fill=colour)
    elif form == "square":
        pen.rectangle(box, fill=colour)
    else:
        pen.polygon([(left, bottom), ((left + right) // 2, top), (right, bottom)], fill=colour)
