import json
from pathlib import Path
from typing import Any

import pytest

from treadle.rollout_server.engine import ElementType
from treadle.rollout_server.engines.common.checkpoint_parameters import checkpoint_parameters

NAMES = ("lm_head.weight", "model.embed_tokens.weight", "model.layers.0.rotary_emb.inv_freq")


def write(directory: Path, **config: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    header = {
        name: {"dtype": "F32", "shape": [2], "data_offsets": [8 * place, 8 * place + 8]}
        for place, name in enumerate(NAMES)
    }
    encoded = json.dumps(header).encode()
    data = len(encoded).to_bytes(8, "little") + encoded + bytes(8 * len(NAMES))
    (directory / "model.safetensors").write_bytes(data)
    return directory


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"tie_word_embeddings": False}, NAMES[:2]),
        ({"tie_word_embeddings": True}, NAMES[1:2]),
        ({}, NAMES[:2]),
        ({"text_config": {"tie_word_embeddings": True}}, NAMES[1:2]),
    ],
)
def test_a_tied_head_and_computed_tables_are_nobodys_to_send(
    config: dict[str, Any], names: tuple[str, ...], tmp_path: Path
) -> None:
    found = checkpoint_parameters(write(tmp_path, **config), "bfloat16")
    assert tuple(spec.name for spec in found) == names
    assert {spec.element_type for spec in found} == {ElementType.BFLOAT16}
