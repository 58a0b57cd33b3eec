# ruff: noqa: D102  (a check's name says what it shows)
"""Updates by the file transport; the kit writes the files below the server's directory."""

import json
import os
import tempfile
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from treadle.conformance.client.refusals import Refusal
from treadle.conformance.server_harness import Checks, ServerHarness
from treadle.rollout.v1 import weight_sync_service_pb2 as sync
from treadle.rollout_server.engine import ElementType, NamedTensor

_NAMES = {
    ElementType.FLOAT32: "F32",
    ElementType.BFLOAT16: "BF16",
    ElementType.FLOAT16: "F16",
    ElementType.FLOAT8_E4M3FN: "F8_E4M3",
}


@pytest.mark.asyncio
class CheckFiles(Checks):
    """BeginUpdate(file)."""

    @asynccontextmanager
    async def capable(self) -> AsyncIterator[tuple[ServerHarness, Path]]:
        """Yields a server that reads files, and an empty directory below its own."""
        async with self.connect() as server:
            if not server.capabilities.file_transport:
                pytest.skip("the server reads no files")
            if self.settings.files is None:
                pytest.skip("needs the directory that the server reads: set --files")
            with directory_in(self.settings.files) as made:
                yield server, made

    @pytest.mark.parametrize("way", ["staged", "in place"])
    async def test_they_bring_what_inline_brings(self, way: str) -> None:
        async with self.capable() as (server, directory):
            if way == "in place" and not server.capabilities.in_place_update:
                pytest.skip("the server takes no updates in place")
            wanted, _ = await server.update_and_sample(1), await server.update(0)
            tensors = server.tensors(1)
            write(directory / "first.safetensors", tensors[::2])
            write(directory / "second.safetensors", tensors[1::2])
            in_place = sync.InPlace(in_flight=sync.IN_FLIGHT_POLICY_DRAIN)
            update_id, begun = await server.begin(
                1,
                inline=None,
                file=_transport(directory, tensors),
                in_place=in_place if way == "in place" else None,
            )
            assert list(begun.received_bytes) == [len(tensor.data) for tensor in tensors]
            assert await server.commit(update_id) == server.info.weight_version + 1
            assert await server.sample() == wanted

    @pytest.mark.parametrize(
        ("wrong", "code"),
        [("checksum", "DATA_LOSS"), ("cut short", "DATA_LOSS"), ("absent", "NOT_FOUND")],
        ids=["checksum", "cut short", "absent"],
    )
    async def test_files_that_are_not_as_announced_are_refused(self, wrong: str, code: str) -> None:
        async with self.capable() as (server, directory):
            before = await server.sample()
            tensors = server.tensors(1)
            transport = _transport(directory, tensors)
            if wrong == "checksum":
                transport.crc32[0] ^= 1
            if wrong != "absent":
                write(directory / "all.safetensors", tensors, cut=int(wrong == "cut short"))
            found = await self._refused(server, transport)
            assert await server.sample() == before
        assert (found.code, found.reason) == (code, "FILE_UNREADABLE")

    async def test_a_link_leads_to_no_other_directory(self) -> None:
        async with self.capable() as (server, directory):
            tensors = server.tensors(1)
            with tempfile.TemporaryDirectory() as elsewhere:
                write(Path(elsewhere) / "all.safetensors", tensors)
                (directory / "link").symlink_to(elsewhere)
                found = await self._refused(server, _transport(directory / "link", tensors))
        assert (found.code, found.reason) == ("PERMISSION_DENIED", "FILE_OUTSIDE_ROOT")

    async def _refused(self, server: ServerHarness, transport: sync.FileTransport) -> Refusal:
        _, found = await server.refused_begin(inline=None, file=transport)
        return found


@contextmanager
def directory_in(files: Path) -> Iterator[Path]:
    """Creates a temporary directory below the server's."""
    with tempfile.TemporaryDirectory(dir=files) as made:
        os.chmod(made, 0o755)  # The server may run as another user.
        yield Path(made)


def _transport(directory: Path, tensors: list[NamedTensor]) -> sync.FileTransport:
    """Returns the transport; its path is relative, because both sides may mount it elsewhere."""
    parts = [directory.name] if directory.name != "link" else [directory.parent.name, "link"]
    crc32 = [zlib.crc32(tensor.data) for tensor in tensors]
    return sync.FileTransport(directory="/".join(parts), crc32=crc32)


def write(path: Path, tensors: list[NamedTensor], *, cut: int = 0) -> None:
    """Writes a safetensors file without its last `cut` bytes."""
    parts = [
        (tensor.spec.name, _NAMES[tensor.spec.element_type], tensor.spec.shape, tensor.data)
        for tensor in tensors
    ]
    path.write_bytes(_safetensors(parts, {})[: -cut or None])


def write_delta(path: Path, tensors: list[NamedTensor], changes: list[bytes], *, base: int) -> None:
    """Writes encoded changes as the file transport of a delta expects them."""
    parts = [
        (tensor.spec.name, "U8", (len(data),), memoryview(data))
        for tensor, data in zip(tensors, changes, strict=True)
    ]
    path.write_bytes(_safetensors(parts, {"base_weight_version": str(base)}))


def _safetensors(
    parts: Sequence[tuple[str, str, tuple[int, ...], memoryview]], metadata: dict[str, str]
) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for name, dtype, shape, data in parts:
        stop = start + len(data)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *(data for *_, data in parts)])
