"""The descriptor sets that the tests compare: today's contract and its releases."""

import re
from pathlib import Path

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from treadle.rollout.v1 import (
    errors_pb2,
    generation_service_pb2,
    routing_service_pb2,
    server_service_pb2,
    weight_sync_service_pb2,
)

RELEASED = Path(__file__).parent / "released"
CONTRACT_FILES: tuple[FileDescriptor, ...] = (
    errors_pb2.DESCRIPTOR,
    generation_service_pb2.DESCRIPTOR,
    routing_service_pb2.DESCRIPTOR,
    server_service_pb2.DESCRIPTOR,
    weight_sync_service_pb2.DESCRIPTOR,
)


def current_set() -> FileDescriptorSet:
    """Returns the contract as the checked-in stubs have it, with what it imports, imports first."""
    files: dict[str, FileDescriptorProto] = {}

    def add(file: FileDescriptor) -> None:
        for dependency in file.dependencies:
            add(dependency)
        if file.name not in files:
            files[file.name] = FileDescriptorProto()
            file.CopyToProto(files[file.name])

    for file in CONTRACT_FILES:
        add(file)
    return FileDescriptorSet(file=files.values())


def released_sets() -> dict[str, FileDescriptorSet]:
    """Returns every release's descriptor set by version, oldest first."""
    paths = sorted(
        RELEASED.glob("*.binpb"), key=lambda p: [int(n) for n in re.findall(r"\d+", p.stem)]
    )
    return {path.stem: FileDescriptorSet.FromString(path.read_bytes()) for path in paths}
