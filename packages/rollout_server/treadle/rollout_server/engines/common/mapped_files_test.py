from contextlib import closing
from pathlib import Path

import torch

from treadle.rollout_server.engines.common.mapped_files import MappedFiles


def test_tensors_are_read_where_they_lie(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    values = torch.arange(6, dtype=torch.float32)
    path.write_bytes(b"abc" + bytes(1) + values.numpy().tobytes())
    with closing(MappedFiles()) as files:
        found = files.tensor(("a", "float32", [2, 3], str(path), 4))
        assert found.tolist() == values.reshape(2, 3).tolist()


def test_a_place_that_is_not_aligned_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    values = torch.arange(4, dtype=torch.float32)
    path.write_bytes(b"abc" + values.numpy().tobytes())
    with closing(MappedFiles()) as files:
        assert files.tensor(("a", "float32", [4], str(path), 3)).tolist() == values.tolist()


def test_a_file_shows_what_is_written_to_it_and_may_grow(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(4))
    with closing(MappedFiles()) as files:
        assert files.tensor(("a", "float16", [2], str(path), 0)).tolist() == [0, 0]
        with path.open("r+b") as file:
            file.write(torch.ones(8, dtype=torch.float16).numpy().tobytes())
        assert files.tensor(("a", "float16", [2], str(path), 0)).tolist() == [1, 1]
        assert files.tensor(("b", "float16", [8], str(path), 0)).tolist() == [1] * 8


def test_a_tensor_without_elements_needs_no_bytes(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.touch()
    with closing(MappedFiles()) as files:
        assert files.tensor(("a", "float32", [0, 2], str(path), 0)).shape == (0, 2)
