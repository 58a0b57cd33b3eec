import hashlib
import json
import struct
from pathlib import Path

import pytest

from treadle.rollout_server.config.schema import ServedModelConfig, ServerConfig
from treadle.rollout_server.engine import ElementType, TensorSpec
from treadle.rollout_server.engines.fake.engine import create
from treadle.rollout_server.model_files import read_model, read_parameters, tokenizer_sha256

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 99,
    "max_position_embeddings": 512,
    "eos_token_id": 3,
}


def model_directory(path: Path, **config: object) -> Path:
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    header = json.dumps({"w": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"1234")
    return path


def test_a_model_is_read_without_transformers(tmp_path: Path) -> None:
    model = read_model(model_directory(tmp_path), context_length=100)
    assert (model.architecture, model.vocab_size, model.context_length) == (
        "Qwen2ForCausalLM",
        99,
        100,
    )
    assert model.eos_token_ids == {3} and model.tokenizer_sha256 == b""
    assert read_parameters(tmp_path) == (
        TensorSpec(name="w", element_type=ElementType.FLOAT16, shape=(2,)),
    )


def test_the_generation_config_names_the_ends_and_the_tokenizer_is_hashed(tmp_path: Path) -> None:
    model_directory(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    (tmp_path / "tokenizer.json").write_text("{}")
    assert read_model(tmp_path).eos_token_ids == {4, 5}
    assert tokenizer_sha256(tmp_path) == hashlib.sha256(b"{}").digest()


def test_what_the_model_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"context_length is 1000, the model in .* has 512"):
        read_model(model_directory(tmp_path), context_length=1000)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="lacks vocab_size, max_position_embeddings"):
        read_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors"):
        read_parameters(tmp_path)


@pytest.mark.asyncio
async def test_the_fake_engine_claims_the_model_it_is_given(tmp_path: Path) -> None:
    config = ServerConfig(model=ServedModelConfig(path=model_directory(tmp_path)))
    engine = await create(config)
    assert engine.info.model == read_model(tmp_path)
    assert engine.info.parameters == read_parameters(tmp_path)
