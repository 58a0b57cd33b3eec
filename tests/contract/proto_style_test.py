"""The contract follows buf's STANDARD rules, and everything in it has a comment.

proto/buf.yaml has the same rules for buf; this test needs only protoc.
"""

import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from grpc_tools import protoc

PROTO = Path("proto")
PASCAL = re.compile(r"([A-Z][a-z0-9]*)+")
LOWER_SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
UPPER_SNAKE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
# Field numbers in FileDescriptorProto and ServiceDescriptorProto: the steps of a location's path.
MESSAGES, ENUMS, SERVICES, METHODS = 4, 5, 6, 2


def compile_contract(out: Path) -> list[FileDescriptorProto]:
    """Returns the descriptors of our files, with comments, which the generated stubs leave out."""
    protos = sorted(p.relative_to(PROTO).as_posix() for p in PROTO.rglob("*.proto"))
    target = out / "contract.binpb"
    includes = [f"-I{PROTO}", f"-I{files('grpc_tools') / '_proto'}"]
    code = protoc.main(
        ["protoc", *includes, "--include_source_info", f"--descriptor_set_out={target}", *protos]
    )
    assert code == 0
    return list(FileDescriptorSet.FromString(target.read_bytes()).file)


@pytest.fixture(scope="module")
def contract(tmp_path_factory: pytest.TempPathFactory) -> list[FileDescriptorProto]:
    return compile_contract(tmp_path_factory.mktemp("contract"))


def undescribed(file: FileDescriptorProto) -> Iterator[str]:
    """Yields what has no comment; a request or response is described by its method's comment."""
    described = {
        tuple(location.path)
        for location in file.source_code_info.location
        if location.leading_comments.strip()
    }
    of_methods = {
        name.rpartition(".")[2]
        for service in file.service
        for method in service.method
        for name in (method.input_type, method.output_type)
    }
    for i, message in enumerate(file.message_type):
        if (MESSAGES, i) not in described and message.name not in of_methods:
            yield message.name
    for i, enum in enumerate(file.enum_type):
        if (ENUMS, i) not in described:
            yield enum.name
    for i, service in enumerate(file.service):
        if (SERVICES, i) not in described:
            yield service.name
        for j, method in enumerate(service.method):
            if (SERVICES, i, METHODS, j) not in described:
                yield f"{service.name}.{method.name}"


def enums_of(file: FileDescriptorProto) -> Iterator[EnumDescriptorProto]:
    yield from file.enum_type
    for message in file.message_type:
        yield from message.enum_type


def badly_named(message: DescriptorProto) -> Iterator[str]:
    if not PASCAL.fullmatch(message.name):
        yield message.name
    for field in message.field:
        if not LOWER_SNAKE.fullmatch(field.name):
            yield f"{message.name}.{field.name}"
    for nested in message.nested_type:
        yield from badly_named(nested)


def test_everything_is_described(contract: list[FileDescriptorProto]) -> None:
    assert [name for file in contract for name in undescribed(file)] == []


def test_messages_and_fields_are_named_in_style(contract: list[FileDescriptorProto]) -> None:
    messages = [message for file in contract for message in file.message_type]
    assert [name for message in messages for name in badly_named(message)] == []


def test_enum_values_carry_their_enums_name_and_zero_means_unset(
    contract: list[FileDescriptorProto],
) -> None:
    for enum in (enum for file in contract for enum in enums_of(file)):
        assert PASCAL.fullmatch(enum.name)
        prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper() + "_"
        assert (enum.value[0].name, enum.value[0].number) == (f"{prefix}UNSPECIFIED", 0)
        for value in enum.value:
            assert UPPER_SNAKE.fullmatch(value.name) and value.name.startswith(prefix), value.name


def test_every_method_has_a_request_and_a_response_of_its_own(
    contract: list[FileDescriptorProto],
) -> None:
    used: list[str] = []
    for file in contract:
        for service in file.service:
            assert service.name.endswith("Service")
            for method in service.method:
                expected = [
                    f".{file.package}.{method.name}{end}" for end in ("Request", "Response")
                ]
                assert [method.input_type, method.output_type] == expected
                used += expected
    assert len(used) == len(set(used))


def test_files_lie_where_their_package_says(contract: list[FileDescriptorProto]) -> None:
    for file in contract:
        folder, _, name = file.name.rpartition("/")
        assert folder.replace("/", ".") == file.package
        assert re.search(r"\.v\d+$", file.package)
        assert LOWER_SNAKE.fullmatch(name.removesuffix(".proto"))
        assert not file.public_dependency and not file.weak_dependency
