import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from treadle.policy.backends.hf_weights import WeightsReader, write_folder
from treadle.policy.client.types import NamedTensor

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "b.bias": torch.ones(5)}


def named() -> Iterator[NamedTensor]:
    for name, tensor in TENSORS.items():
        yield NamedTensor(name=name, tensor=tensor)


@pytest.fixture
def like(tmp_path: Path) -> Path:
    folder = tmp_path / "like"
    folder.mkdir()
    config = {"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"the old weights")
    return folder


@pytest.mark.parametrize("shard_bytes", [1 << 20, 1])
def test_what_is_written_is_read(tmp_path: Path, like: Path, shard_bytes: int) -> None:
    folder = tmp_path / "written"
    write_folder(named(), folder, like=like, shard_bytes=shard_bytes)
    with WeightsReader(folder) as reader:
        assert reader.names == TENSORS.keys()
        assert all(torch.equal(reader[name], tensor) for name, tensor in TENSORS.items())
        with pytest.raises(KeyError, match=r"no tensor 'c'"):
            reader["c"]
    config = json.loads((folder / "config.json").read_text())
    assert config == {"torch_dtype": "float32", "dtype": "float32"}
    files = sorted(p.name for p in folder.iterdir())
    if shard_bytes > 1:
        assert files == ["config.json", "model.safetensors"]
    else:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {
            "a.weight": "model-00001.safetensors",
            "b.bias": "model-00002.safetensors",
        }
        assert index["metadata"] == {"total_size": 44}


MODEL = (
    *("chat_template.jinja", "additional_chat_templates/tool.jinja", "config.json", "LICENSE"),
    *("generation_config.json", "merges.txt", "modeling_own.py", "preprocessor_config.json"),
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"),
)
OTHERS = (
    *("original/consolidated.00.pth", "consolidated.safetensors", "tf_model.h5", "model.onnx"),
    *("pytorch_model.bin.index.json", "model.safetensors.index.json.bak", "training_args.bin"),
    *(".gitattributes", ".git/big.pack", "checkpoint-5/config.json", "README.md", "notes.txt"),
    *("adapter/adapter_config.json", "runs/a/checkpoints/step-1.partial/policy/config.json"),
)


def test_only_the_files_of_a_model_are_taken_over(tmp_path: Path, like: Path) -> None:
    for name in (*MODEL, *OTHERS):
        (like / name).parent.mkdir(parents=True, exist_ok=True)
        (like / name).write_text("{}")
    (like / "vocab.json").unlink()
    (like / "vocab.json").symlink_to(like / "notes.txt")  # as in the Hub's cache
    folder = like / "runs/a/checkpoints/step-1.partial/hf"  # below what it is copied from
    write_folder(named(), folder, like=like)
    written = {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()}
    assert written == {*MODEL, "model.safetensors"}
    assert not (folder / "vocab.json").is_symlink()


def test_a_folder_that_could_not_be_finished_is_not_there(tmp_path: Path, like: Path) -> None:
    def broken() -> Iterator[NamedTensor]:
        yield from named()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_folder(broken(), tmp_path / "written", like=like, shard_bytes=1)
    assert [p.name for p in tmp_path.iterdir()] == ["like"]


def test_nothing_is_overwritten_and_an_empty_folder_is_refused(tmp_path: Path, like: Path) -> None:
    with pytest.raises(FileExistsError, match="like exists"):
        write_folder(named(), like, like=like)
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        WeightsReader(tmp_path)
