"""Programs of different releases interoperate: each preserves fields that it does not know.

Three pairs, for every message of the contract: a released client and today's code; today's code and
a later version that has one more field in every message; today's code and an earlier one that lacks
the newest field.
"""

from collections.abc import Callable
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from contract.descriptors import current_set, released_sets
from contract.wire_diff import PACKAGE_PREFIX
from treadle.rollout.v1 import generation_service_pb2

NEW_FIELD = "field_from_the_future"
SAMPLES: dict[int, object] = {
    FieldDescriptor.CPPTYPE_BOOL: True,
    FieldDescriptor.CPPTYPE_DOUBLE: 0.25,
    FieldDescriptor.CPPTYPE_FLOAT: 0.5,
    FieldDescriptor.CPPTYPE_INT32: -7,
    FieldDescriptor.CPPTYPE_INT64: -(1 << 40),
    FieldDescriptor.CPPTYPE_UINT32: (1 << 32) - 1,
    FieldDescriptor.CPPTYPE_UINT64: (1 << 64) - 1,
}

MessageClasses = dict[str, type[Message]]


def message_classes(files: FileDescriptorSet) -> MessageClasses:
    """Returns the messages of one version of the contract, by full name."""
    pool = DescriptorPool()
    for file in files.file:
        pool.Add(file)
    found: MessageClasses = {}

    def add(descriptor: Descriptor) -> None:
        if descriptor.GetOptions().map_entry:  # no message that a program makes
            return
        found[descriptor.full_name] = GetMessageClass(descriptor)
        for nested in descriptor.nested_types:
            add(nested)

    for file in files.file:
        if file.package.startswith(PACKAGE_PREFIX):
            for descriptor in pool.FindFileByName(file.name).message_types_by_name.values():
                add(descriptor)
    return found


def edited(edit: Callable[[DescriptorProto], None]) -> FileDescriptorSet:
    """Returns today's contract with every message of ours edited."""
    files = current_set()
    for file in files.file:
        if file.package.startswith(PACKAGE_PREFIX):
            for message in file.message_type:
                edit(message)
    return files


def add_a_field(message: DescriptorProto) -> None:
    message.field.add(
        name=NEW_FIELD,
        number=1 + max([100, *(f.number for f in message.field)]),
        type=FieldDescriptorProto.TYPE_STRING,
        label=FieldDescriptorProto.LABEL_OPTIONAL,
    )


def drop_the_newest_field(message: DescriptorProto) -> None:
    plain = [f for f in message.field if not f.HasField("oneof_index")]
    if plain:
        message.field.remove(max(plain, key=lambda f: f.number))


CURRENT = message_classes(current_set())
RELEASED = {version: message_classes(files) for version, files in released_sets().items()}
NEWER = message_classes(edited(add_a_field))
OLDER = message_classes(edited(drop_the_newest_field))


def fill(message: Message, depth: int = 0) -> Message:
    """Sets every field, so that a lost one is noticed; of a oneof the last one stays."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = (sample(inner) for inner in field.message_type.fields)
            getattr(message, field.name)[key] = value
            continue
        if field.message_type is not None:
            if depth < 5:
                inner = getattr(message, field.name)
                fill(inner.add() if field.is_repeated else inner, depth + 1)
            continue
        value = sample(field)
        if field.is_repeated:
            getattr(message, field.name).extend([value, value])
        else:
            setattr(message, field.name, value)
    return message


def sample(field: Any) -> object:  # of two classes: protobuf's own, or that of its C library
    if field.enum_type is not None:
        return field.enum_type.values[-1].number
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return b"\x00\xff" if field.type == FieldDescriptor.TYPE_BYTES else "täst"
    return SAMPLES[field.cpp_type]


def pairs(sender: MessageClasses, receiver: MessageClasses) -> list[ParameterSet]:
    return [
        pytest.param(sender[name], receiver[name], id=name.rpartition(".")[2]) for name in sender
    ]


def through(sent: Message, receiver: type[Message]) -> Message:
    """Sends a message through a program of another version and back."""
    received = receiver.FromString(sent.SerializeToString(deterministic=True))
    return type(sent).FromString(received.SerializeToString(deterministic=True))


@pytest.mark.parametrize("version", RELEASED)
def test_released_messages_keep_everything_in_todays_code(version: str) -> None:
    for name, released in RELEASED[version].items():
        sent = fill(released())
        received = CURRENT[name].FromString(sent.SerializeToString())
        for field in sent.DESCRIPTOR.fields:
            assert str(getattr(received, field.name)) == str(getattr(sent, field.name)), (
                field.full_name
            )
        assert through(sent, CURRENT[name]) == sent


@pytest.mark.parametrize("version", RELEASED)
def test_todays_messages_survive_a_released_program(version: str) -> None:
    for name, released in RELEASED[version].items():
        sent = fill(CURRENT[name]())
        assert through(sent, released) == sent


@pytest.mark.parametrize("version", RELEASED)
def test_a_released_message_lacks_what_was_added_since(version: str) -> None:
    for name, released in RELEASED[version].items():
        received = CURRENT[name].FromString(fill(released()).SerializeToString())
        known = set(released.DESCRIPTOR.fields_by_name)
        assert {field.name for field, _ in received.ListFields()} <= known


@pytest.mark.parametrize(("newer", "current"), pairs(NEWER, CURRENT))
def test_a_field_from_the_future_is_kept(newer: type[Message], current: type[Message]) -> None:
    sent = fill(newer())
    returned = through(sent, current)
    assert returned == sent
    assert getattr(returned, NEW_FIELD) == "täst"


@pytest.mark.parametrize(("older", "current"), pairs(OLDER, CURRENT))
def test_a_field_the_sender_lacks_is_absent(older: type[Message], current: type[Message]) -> None:
    received = current.FromString(fill(older()).SerializeToString())
    for name in set(current.DESCRIPTOR.fields_by_name) - set(older.DESCRIPTOR.fields_by_name):
        field = current.DESCRIPTOR.fields_by_name[name]
        assert field not in [present for present, _ in received.ListFields()]
        if field.has_presence:
            assert not received.HasField(name)


def test_the_messages_compared_are_the_ones_our_code_uses() -> None:
    sent = fill(generation_service_pb2.GenerateRequest())
    received = CURRENT["treadle.rollout.v1.GenerateRequest"].FromString(sent.SerializeToString())
    assert str(received) == str(sent)


def test_fill_sets_every_field_outside_a_oneof() -> None:
    for cls in CURRENT.values():
        filled = fill(cls())
        present = {field.name for field, _ in filled.ListFields()}
        for field in cls.DESCRIPTOR.fields:
            oneof = field.containing_oneof
            alone = oneof is None or len(oneof.fields) == 1
            assert not alone or field.name in present, field.full_name
