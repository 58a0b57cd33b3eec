"""Reading images, and where their ids stand."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

from treadle.rollout_server.engine import PromptImage
from treadle.rollout_server.engines.torch.images import (
    ImagePatches,
    ImageReader,
    PlacedPatches,
)
from treadle.rollout_server.engines.torch.vision import ImagePositions
from treadle.rollout_server.engines.torch.vision_harness import (
    PLACEHOLDER,
    picture,
    placed,
    write_vision_model,
)
from treadle.rollout_server.errors import ImageUnreadable

_MODEL: Any = Qwen2_5_VLModel
with torch.device("meta"):
    REFERENCE: Any = _MODEL(
        Qwen2_5_VLConfig(
            text_config={"num_hidden_layers": 1, "vocab_size": 8}, vision_config={"depth": 1}
        )
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vision")
    write_vision_model(directory, 0)
    return directory


@pytest.fixture
def reader(path: Path) -> Iterator[ImageReader]:
    # Room for two pictures of 16 by 16 pixels, each seen as two equal frames.
    reader = ImageReader(path, placeholder_id=PLACEHOLDER, cache_bytes=2 * 2 * 3 * 16 * 16)
    yield reader
    reader.close()


async def serials(reader: ImageReader, *parts: bytes) -> list[int]:
    prompt, images = placed([part for image in parts for part in (image, 7)])
    return [read.image.serial for read in await reader.read(images, prompt)]


@pytest.mark.asyncio
async def test_equal_bytes_have_one_number_while_they_are_kept(reader: ImageReader) -> None:
    one, two, three = (picture(16, 16, seed=seed) for seed in range(3))
    assert await serials(reader, one, two, one) == [0, 1, 0]
    assert await serials(reader, three) == [2]  # Two goes: it was used longest ago.
    assert await serials(reader, one, two) == [0, 3]


@pytest.mark.asyncio
async def test_a_file_that_would_fill_the_memory_is_not_decoded(
    reader: ImageReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.BytesIO()
    Image.new("1", (9000, 9000)).save(file, "PNG")
    image = PromptImage(data=file.getvalue(), media_type="image/png", start=0, num_tokens=1)
    assert len(image.data) < 20_000

    def refuse(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(Image.Image, "load", refuse)
    with pytest.raises(ImageUnreadable, match="9000x9000 pixels, at most 67108864 are taken"):
        await reader.read([image], [PLACEHOLDER])


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA", "LA", "I;16"])
async def test_pictures_of_every_colour_kind_are_read(reader: ImageReader, mode: str) -> None:
    file = io.BytesIO()
    Image.new(mode, (24, 16)).save(file, "PNG")
    prompt, images = placed([file.getvalue()])
    (read,) = await reader.read(images, prompt)
    assert (read.grid, read.image.patches.shape) == ((2, 3), (24, 2 * 3 * 4 * 4))


Part = int | tuple[int, int]
PARTS = st.lists(
    st.integers(1, 5) | st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=7
)


@given(PARTS)
def test_positions_are_those_of_transformers(parts: Sequence[Part]) -> None:
    ids = 0
    images: list[PlacedPatches] = []
    kinds: list[int] = []
    for part in parts:
        if isinstance(part, tuple):
            patches = ImagePatches(serial=0, grid=part, patches=torch.empty(0))
            images.append(PlacedPatches(start=ids, grid=part, image=patches))
            kinds += [1] * (part[0] * part[1])
            # transformers takes images that touch for one.
            part = 1
        kinds += [0] * part
        ids = len(kinds)
    grids = torch.tensor([[1, 2 * p.grid[0], 2 * p.grid[1]] for p in images]).view(-1, 3)
    positions, delta = REFERENCE.get_rope_index(
        torch.zeros(1, ids, dtype=torch.long), torch.tensor([kinds]), image_grid_thw=grids
    )
    ours = ImagePositions.of(images, ids)
    assert torch.equal(ours.prompt, positions[:, 0])
    assert ours.offset == int(delta[0])
    after = ours.within(ids, ids + 2)
    assert after.tolist() == [[ids + ours.offset, ids + 1 + ours.offset]] * 3
