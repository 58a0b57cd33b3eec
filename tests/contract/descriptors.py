"""The descriptor sets that the tests compare: today's contract, its record and its releases."""

from pathlib import Path

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from treadle.loop_worker.v1 import loop_worker_service_pb2, trajectory_pb2
from treadle.policy.v1 import (
    checkpoint_service_pb2,
    rank_service_pb2,
    training_service_pb2,
    weights_service_pb2,
)
from treadle.policy.v1 import errors_pb2 as policy_errors_pb2
from treadle.rollout.v1 import (
    errors_pb2,
    generation_service_pb2,
    routing_service_pb2,
    server_service_pb2,
    weight_sync_service_pb2,
)

RELEASED = Path(__file__).parent / "released"
RECORDED = Path(__file__).parent / "recorded.binpb"
CONTRACT_FILES: tuple[FileDescriptor, ...] = (
    errors_pb2.DESCRIPTOR,
    generation_service_pb2.DESCRIPTOR,
    routing_service_pb2.DESCRIPTOR,
    server_service_pb2.DESCRIPTOR,
    weight_sync_service_pb2.DESCRIPTOR,
    checkpoint_service_pb2.DESCRIPTOR,
    policy_errors_pb2.DESCRIPTOR,
    rank_service_pb2.DESCRIPTOR,
    training_service_pb2.DESCRIPTOR,
    weights_service_pb2.DESCRIPTOR,
    loop_worker_service_pb2.DESCRIPTOR,
    trajectory_pb2.DESCRIPTOR,
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


def recorded_set() -> FileDescriptorSet:
    """Returns the contract as it was last recorded (record.py)."""
    return FileDescriptorSet.FromString(RECORDED.read_bytes())


def release_folders() -> dict[str, Path]:
    """Returns every release's folder by version, oldest first."""
    folders = (path.parent for path in RELEASED.glob("*/contract.binpb"))
    by_version = sorted(folders, key=lambda path: [int(n) for n in path.name.split(".")])
    return {path.name: path for path in by_version}


def released_sets() -> dict[str, FileDescriptorSet]:
    """Returns every release's descriptor set by version, oldest first."""
    return {
        version: FileDescriptorSet.FromString((folder / "contract.binpb").read_bytes())
        for version, folder in release_folders().items()
    }
