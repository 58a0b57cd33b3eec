"""Images in SGLang: its multimodal inputs, from images that `engines/images` has read.

Invariant: SGLang gets a prompt's ids as they are, with the places and the patches of its images. It
never runs its own processor: no id is added, removed or expanded.

SGLang identifies an image by a number, its hash, and writes a pad id that follows from it in the
image's place, by which prefixes are compared. `engines/images` numbers distinct images.
"""

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalProcessorOutput,
)

from treadle.rollout_server.engine import EngineRequest
from treadle.rollout_server.engines.images.inputs import ImageInput
from treadle.rollout_server.engines.images.positions import ImagePositions


def multimodal_inputs(
    request: EngineRequest, images: Sequence[ImageInput], *, placeholder_id: int
) -> Any:
    """Returns what SGLang's processor would return for the images of a request."""
    num_ids = len(request.prompt)
    positions = ImagePositions.of([one.placed for one in images], num_ids)
    # Also for the completion: SGLang reads it as part of the prompt after it was paused.
    completion = positions.within(num_ids, num_ids + request.sampling.max_tokens)
    return MultimodalProcessorOutput(
        mm_items=[_item(one) for one in images],
        im_token_id=placeholder_id,
        mrope_positions=torch.cat([positions.prompt, completion], dim=1),
        mrope_position_delta=torch.tensor([[positions.offset]]),
    )


def _item(image: ImageInput) -> Any:
    item = MultimodalDataItem(
        modality=Modality.IMAGE,
        offsets=[(image.placed.start, image.placed.stop - 1)],
        feature=image.patches,
        model_specific_data={"image_grid_thw": torch.tensor([image.grid_thw])},
    )
    item.set_hash(image.placed.image.serial)
    return item
