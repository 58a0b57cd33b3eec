"""Reading images, and where their ids stand."""

import asyncio
import io
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageOps
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

from treadle.rollout_server.engine import PromptImage
from treadle.rollout_server.engines.images import reader as module
from treadle.rollout_server.engines.images.positions import ImagePositions
from treadle.rollout_server.engines.images.reader import (
    DecodedImage,
    ImageDecoder,
    PlacedImage,
)
from treadle.rollout_server.engines.torch.testing.vision_model import (
    PLACEHOLDER,
    picture,
    placed,
    write_vision_model,
)
from treadle.rollout_server.engines.torch.vision import ImageEncoder
from treadle.rollout_server.errors import ImageUnreadable, PlaceholderMismatch

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
def reader(path: Path) -> Iterator[ImageDecoder]:
    # Room for two pictures of 16 by 16 pixels.
    reader = ImageDecoder(path, placeholder_id=PLACEHOLDER, cache_bytes=2 * 3 * 16 * 16)
    yield reader
    reader.close()


async def serials(reader: ImageDecoder, *parts: bytes) -> list[int]:
    prompt, images = placed([part for image in parts for part in (image, 7)])
    return [read.image.serial for read in await reader.read(images, prompt)]


@pytest.mark.asyncio
async def test_equal_bytes_have_one_number_and_the_latest_are_kept(
    reader: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, three = (picture(16, 16, seed=seed) for seed in range(3))
    decode, decoded = reader._decode, list[bytes]()

    def note(image: PromptImage) -> torch.Tensor:
        decoded.append(image.data)
        return decode(image)

    monkeypatch.setattr(reader, "_decode", note)
    assert await serials(reader, one, two, one) == [0, 1, 0]
    assert await serials(reader, three) == [2]  # Two goes: it was used longest ago.
    assert await serials(reader, one, two) == [0, 1]
    assert decoded == [one, two, three, two]


@pytest.mark.asyncio
async def test_a_number_that_was_forgotten_is_given_to_nobody(
    reader: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_SERIALS", 2)
    parts = [picture(16, 16, seed=seed) for seed in range(4)]
    assert await serials(reader, *parts) == [0, 1, 2, 3]
    assert await serials(reader, *parts[:2]) == [4, 5]


@pytest.mark.asyncio
async def test_a_file_that_would_fill_the_memory_is_not_decoded(
    reader: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.BytesIO()
    Image.new("1", (9000, 9000)).save(file, "PNG")
    image = PromptImage(data=file.getvalue(), media_type="image/png", start=0, num_tokens=1)
    assert len(image.data) < 20_000

    def refuse(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(Image.Image, "load", refuse)
    with pytest.raises(ImageUnreadable, match="9000x9000 pixels, the maximum is 67108864"):
        await reader.read([image], [PLACEHOLDER])


class Mirror:
    """A tower that gives back the patches it is given."""

    config = SimpleNamespace(patch_size=4, temporal_patch_size=2, spatial_merge_size=2)
    dtype = torch.float32

    def __call__(self, patches: torch.Tensor, *, grid_thw: torch.Tensor) -> SimpleNamespace:
        self.grid = grid_thw.tolist()
        return SimpleNamespace(pooler_output=patches)


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [(24, 16), (37, 91), (300, 200), (5, 9)])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "L", "P", "1", "I;16"])
async def test_patches_are_those_of_the_image_processor(
    reader: ImageDecoder, mode: str, size: tuple[int, int]
) -> None:
    noise = Image.open(io.BytesIO(picture(*size)))
    noise.putalpha(Image.linear_gradient("L").resize(size))
    file = io.BytesIO()
    (noise.convert("L") if mode == "I;16" else noise).convert(mode).save(file, "PNG")
    expected = reader.processor(images=[Image.open(file)], return_tensors="pt")
    _, rows, columns = expected["image_grid_thw"][0].tolist()
    image = PromptImage(
        data=file.getvalue(), media_type="image/png", start=0, num_tokens=rows * columns // 4
    )
    (read,) = await reader.read([image], [PLACEHOLDER] * image.num_tokens)
    tower = Mirror()
    patches = ImageEncoder(tower, reader.processor, torch.device("cpu")).encode_image(read)
    assert tower.grid == [[1, rows, columns]]
    torch.testing.assert_close(patches, expected["pixel_values"], atol=1e-5, rtol=0)


@pytest.mark.asyncio
async def test_a_picture_that_was_asked_for_by_many_is_read_once(
    reader: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, images = placed([picture(16, 16)])
    all_wait = threading.Barrier(2, timeout=60)
    decode, decoded = reader._decode, []

    def slowly(image: PromptImage) -> torch.Tensor:
        decoded.append(image)
        all_wait.wait()
        return decode(image)

    monkeypatch.setattr(reader, "_decode", slowly)
    reads = [asyncio.create_task(reader.read(images, prompt)) for _ in range(3)]
    await asyncio.to_thread(all_wait.wait)
    pictures = {read.image for (read,) in await asyncio.gather(*reads)}
    assert len(pictures) == len(decoded) == 1


@pytest.mark.asyncio
async def test_a_picture_that_could_not_be_read_is_tried_again(reader: ImageDecoder) -> None:
    prompt, images = placed([picture(16, 16)])
    cut = replace(images[0], data=images[0].data[:-60])
    for _ in range(2):
        with pytest.raises(ImageUnreadable, match="truncated"):
            await reader.read([cut], prompt)
    assert await reader.read(images, prompt)


class Decoding:
    """Holds a reader's threads in `decode` until it is told to go on."""

    def __init__(self, reader: ImageDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self._decode = reader._decode
        self._arrivals = threading.Semaphore(0)
        self._go_on = threading.Event()
        self.begun: list[bytes] = []
        monkeypatch.setattr(reader, "_decode", self)

    def __call__(self, image: PromptImage) -> torch.Tensor:
        self.begun.append(image.data)
        self._arrivals.release()
        assert self._go_on.wait(60)
        return self._decode(image)

    async def arrived(self, count: int) -> None:
        for _ in range(count):
            assert await asyncio.to_thread(self._arrivals.acquire, timeout=60)

    def go_on(self) -> None:
        self._go_on.set()


async def waiting(reader: ImageDecoder, *, prompts: int) -> None:
    """Returns when so many wait for pictures, whose bytes were hashed on threads by then."""
    while sum(reading.num_waiting for reading in reader._pending.values()) < prompts:
        await asyncio.to_thread(bool)


@pytest.mark.asyncio
async def test_samples_that_wait_for_one_picture_leave_the_threads_to_others(
    reader: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = [picture(16, 16, seed=seed) for seed in range(4)]
    decoding = Decoding(reader, monkeypatch)
    reads = [asyncio.create_task(serials(reader, one)) for one in pictures for _ in range(8)]
    await decoding.arrived(4)
    assert sorted(decoding.begun) == sorted(pictures)
    decoding.go_on()
    assert len({serial for (serial,) in await asyncio.gather(*reads)}) == 4


@pytest.mark.asyncio
async def test_who_leaves_takes_the_picture_from_nobody(
    reader: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = Decoding(reader, monkeypatch)
    first, second = (asyncio.create_task(serials(reader, picture(16, 16))) for _ in range(2))
    await decoding.arrived(1)
    await waiting(reader, prompts=2)
    first.cancel()
    await asyncio.wait({first})
    decoding.go_on()
    assert (first.cancelled(), await second) == (True, [0])
    assert len(decoding.begun) == 1


@pytest.mark.asyncio
async def test_what_nobody_waits_for_any_more_is_not_decoded(
    reader: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = Decoding(reader, monkeypatch)
    parts = [picture(16, 16, seed=seed) for seed in range(6)]
    many = [asyncio.create_task(serials(reader, one, parts[5])) for one in parts[:4]]
    await decoding.arrived(4)
    many.append(asyncio.create_task(serials(reader, parts[4], parts[5])))
    await waiting(reader, prompts=5)
    for task in many:
        task.cancel()
    await asyncio.wait(many)
    last = asyncio.create_task(serials(reader, parts[5]))
    decoding.go_on()
    await last
    assert sorted(decoding.begun[:4]) == sorted(parts[:4])
    assert decoding.begun[4:] == [parts[5]]


@pytest.mark.asyncio
async def test_a_closed_reader_decodes_nothing_that_waits(
    reader: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = Decoding(reader, monkeypatch)
    parts = [picture(16, 16, seed=seed) for seed in range(6)]
    reads = [asyncio.create_task(serials(reader, one, parts[5])) for one in parts[:4]]
    await decoding.arrived(4)
    reads.append(asyncio.create_task(serials(reader, parts[4], parts[5])))
    await waiting(reader, prompts=5)
    reader.close()
    decoding.go_on()
    assert await asyncio.gather(*reads) == [[]] * 5
    assert sorted(decoding.begun) == sorted(parts[:4])
    assert await serials(reader, parts[5]) == []


@pytest.mark.asyncio
@pytest.mark.parametrize("orientation", range(10))
async def test_a_picture_is_turned_upright_whatever_else_its_exif_says(
    reader: ImageDecoder, orientation: int
) -> None:
    shown = Image.open(io.BytesIO(picture(24, 16)))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    exif[ExifTags.Base.XResolution] = 72.0
    turned, odd = io.BytesIO(), exif.tobytes()
    shown.save(turned, "PNG", exif=odd)
    upright = io.BytesIO()
    ImageOps.exif_transpose(Image.open(turned)).save(upright, "PNG")
    # The entry's type becomes text, which Pillow reads and cannot write as that tag again.
    entry = odd.index(struct.pack(">HHI", ExifTags.Base.XResolution, 5, 1))
    odd = odd[: entry + 2] + struct.pack(">HI", 2, 4) + odd[entry + 8 :]
    strange = io.BytesIO()
    shown.save(strange, "PNG", exif=odd)
    read = [
        reader._decode(
            PromptImage(data=file.getvalue(), media_type="image/png", start=0, num_tokens=1)
        )
        for file in (upright, turned, strange)
    ]
    assert torch.equal(read[0], read[1]) and torch.equal(read[0], read[2])


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", ["L", "CMYK"])
async def test_jpegs_have_the_colours_of_the_image_processor(
    reader: ImageDecoder, mode: str
) -> None:
    file = io.BytesIO()
    Image.open(io.BytesIO(picture(24, 16))).convert(mode).save(file, "JPEG")
    expected = reader.processor(images=[Image.open(file)], return_tensors="pt")
    image = PromptImage(data=file.getvalue(), media_type="image/jpeg", start=0, num_tokens=6)
    (read,) = await reader.read([image], [PLACEHOLDER] * 6)
    patches = ImageEncoder(Mirror(), reader.processor, torch.device("cpu")).encode_image(read)
    torch.testing.assert_close(patches, expected["pixel_values"], atol=1e-5, rtol=0)


@pytest.mark.asyncio
async def test_of_an_animation_the_first_picture_counts(reader: ImageDecoder) -> None:
    first, second = (Image.open(io.BytesIO(picture(16, 16, seed=seed))) for seed in range(2))
    film, still = io.BytesIO(), io.BytesIO()
    first.save(film, "WEBP", lossless=True, save_all=True, append_images=[second])
    first.save(still, "WEBP", lossless=True)
    read = [
        await reader.read(
            [PromptImage(data=f.getvalue(), media_type="image/webp", start=0, num_tokens=4)],
            [PLACEHOLDER] * 4,
        )
        for f in (film, still)
    ]
    assert torch.equal(read[0][0].image.pixels, read[1][0].image.pixels)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("data", "media_type", "message"),
    [
        (b"\x89PNG\r\n\x1a\n", "image/png", "it does not start with a PNG header"),
        (b"\xff\xd8\xff", "image/jpeg", "it does not start with a JPEG header"),
        (b"RIFF\x04\0\0\0WEBP", "image/webp", "it does not start with a WEBP header"),
    ],
)
async def test_a_file_without_a_header_is_named_as_such(
    reader: ImageDecoder, data: bytes, media_type: str, message: str
) -> None:
    image = PromptImage(data=data, media_type=media_type, start=0, num_tokens=1)
    with pytest.raises(ImageUnreadable, match=message):
        await reader.read([image], [PLACEHOLDER])


@pytest.fixture(scope="module")
def files(path: Path) -> Iterator[tuple[ImageDecoder, list[tuple[str, bytes]]]]:
    reader = ImageDecoder(path, placeholder_id=PLACEHOLDER, cache_bytes=0)
    kinds = ("PNG", "JPEG", "WEBP")
    yield reader, [(f"image/{kind.lower()}", picture(16, 16, kind=kind)) for kind in kinds]
    reader.close()


@given(st.integers(0, 2), st.integers(0), st.binary(max_size=4), st.integers(0, 4))
def test_a_broken_file_is_read_or_refused(
    files: tuple[ImageDecoder, list[tuple[str, bytes]]],
    which: int,
    place: int,
    written: bytes,
    removed: int,
) -> None:
    reader, kinds = files
    media_type, data = kinds[which]
    place %= len(data)
    data = data[:place] + written + data[place + removed :]
    image = PromptImage(data=data, media_type=media_type, start=0, num_tokens=4)
    try:
        (read,) = asyncio.run(reader.read([image], [PLACEHOLDER] * 4))
    except (ImageUnreadable, PlaceholderMismatch):
        return
    assert read.image.pixels.shape == (3, 8 * read.grid[0], 8 * read.grid[1])


Part = int | tuple[int, int]
PARTS = st.lists(
    st.integers(1, 5) | st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=7
)


@given(PARTS)
def test_positions_are_those_of_transformers(parts: Sequence[Part]) -> None:
    ids = 0
    images: list[PlacedImage] = []
    kinds: list[int] = []
    for part in parts:
        if isinstance(part, tuple):
            picture = DecodedImage(serial=0, pixels=torch.empty(0))
            images.append(PlacedImage(start=ids, grid=part, image=picture))
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
