"""Images as the model's processor of transformers makes them, and what is wrong with others."""

import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
import transformers

from treadle.agent_loop import Image, PlacedImage, SetupError
from treadle.policy.backends.megatron.architecture import Architecture
from treadle.policy.backends.vision.reader import ImageReader
from treadle.policy.backends.vision.shape import VisionShape
from treadle.policy.testing.seeing import picture, write_seeing_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_seeing_model(path)
    return path


@pytest.fixture(scope="module")
def shape(folder: Path) -> VisionShape:
    found = Architecture.from_folder(folder).vision
    assert found is not None
    return found


def turned(image: Image, orientation: int) -> Image:
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    PIL.Image.open(io.BytesIO(image.data)).save(file, "PNG", exif=exif)
    return Image(data=file.getvalue(), mime="image/png")


@pytest.mark.parametrize(
    ("image", "grid"),
    [
        (picture(48, 24), (3, 6)),
        (picture(45, 22), (3, 6)),  # rounded
        (picture(200, 100), (5, 11)),  # too large
        (picture(24, 24, mode="RGBA"), (3, 3)),
        (picture(24, 24, mode="L"), (3, 3)),
        (turned(picture(48, 24), 6), (6, 3)),
        (turned(picture(48, 24), 2), (3, 6)),
    ],
)
def test_patches_and_grid_are_the_processors(
    folder: Path, shape: VisionShape, image: Image, grid: tuple[int, int]
) -> None:
    reader = ImageReader(folder, shape)
    processors: Any = transformers.AutoImageProcessor
    processor = processors.from_pretrained(folder, backend="pil")
    upright = PIL.ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(image.data)))
    want = processor(images=[upright], return_tensors="pt")
    placed = PlacedImage(image=image, start=0, num_tokens=grid[0] * grid[1])
    assert reader.grid(placed) == grid
    assert want.image_grid_thw.tolist() == [[1, 2 * grid[0], 2 * grid[1]]]
    assert torch.equal(reader.patches(image), want.pixel_values)
    reader.close()


def test_what_is_wrong_with_an_image_is_said(folder: Path, shape: VisionShape) -> None:
    reader = ImageReader(folder, shape)
    with pytest.raises(ValueError, match=r"at 3 has 17 placeholder ids, and by .* 3 x 6"):
        reader.grid(PlacedImage(image=picture(48, 24), start=3, num_tokens=17))
    noise = Image(data=b"no image", mime="image/png")
    with pytest.raises(ValueError, match="an image of 8 bytes is not image/png"):
        reader.grid(PlacedImage(image=noise, start=0, num_tokens=1))
    cut = Image(data=picture(48, 24).data[:-80], mime="image/png")
    with pytest.raises(OSError, match="truncated"):
        reader.patches(cut)
    reader.close()


def test_a_processor_must_fit_the_tower(folder: Path, shape: VisionShape, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"\(8, 2, 2\) and the image processor \(4, 2, 2\)"):
        ImageReader(folder, replace(shape, patch=8))
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(SetupError, match="no image processor that loads"):
        ImageReader(tmp_path, shape)
