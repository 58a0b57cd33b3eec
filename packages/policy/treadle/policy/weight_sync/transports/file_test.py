import errno
import zlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from treadle.policy.testing.weights_only import Weights
from treadle.policy.v1 import weights_service_pb2 as weights_pb
from treadle.policy.weight_sync.payload import tensor_bytes
from treadle.policy.weight_sync.transports.file import write_files


def test_the_library_reads_what_is_written(tmp_path: Path, weights: Weights) -> None:
    directory = tmp_path / "v1"
    report = write_files(
        weights,
        weights_pb.WriteFilesRequest(directory=str(directory), element_type="float32", version=7),
        rank=0,
    )
    (file,) = directory.iterdir()
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"weight_version": "7"}
    read = load_file(file)
    assert list(read) == sorted(weights.tensors)
    for name, tensor in weights.tensors.items():
        assert torch.equal(read[name], tensor)
        assert report.crc32[name] == zlib.crc32(tensor_bytes(tensor, "float32"))
    assert report.num_bytes == sum(4 * tensor.numel() for tensor in weights.tensors.values())


def test_weights_are_converted_on_the_way(tmp_path: Path, weights: Weights) -> None:
    write_files(
        weights,
        weights_pb.WriteFilesRequest(directory=str(tmp_path), element_type="bfloat16", version=7),
        rank=0,
    )
    (file,) = tmp_path.iterdir()
    for name, tensor in load_file(file).items():
        assert torch.equal(tensor, weights.tensors[name].to(torch.bfloat16))


def test_a_rank_without_weights_of_its_own_only_takes_part(
    tmp_path: Path, weights: Weights
) -> None:
    report = write_files(
        weights,
        weights_pb.WriteFilesRequest(directory=str(tmp_path), element_type="float32", version=7),
        rank=1,
    )
    assert (report.num_bytes, list(tmp_path.iterdir())) == (0, [])
    assert weights.exports == 1


def test_no_file_appears_when_the_disk_is_full(
    tmp_path: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    wanted = f"No space left on device .make room.*{tmp_path}/rank-00000.safetensors"
    with pytest.raises(OSError, match=wanted):
        write_files(
            weights,
            weights_pb.WriteFilesRequest(
                directory=str(tmp_path), element_type="float32", version=7
            ),
            rank=0,
        )
    assert list(tmp_path.iterdir()) == []
