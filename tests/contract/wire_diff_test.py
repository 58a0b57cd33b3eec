"""The comparison finds every way to break a contract and accepts additions."""

from collections.abc import Callable

import pytest
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from contract.descriptors import current_set
from contract.wire_diff import breakages

BASE = """
name: "treadle/loom/v1/loom.proto"
package: "treadle.loom.v1"
syntax: "proto3"
message_type {
  name: "WeaveRequest"
  field { name: "pattern" json_name: "pattern" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "rows" json_name: "rows" number: 2 type: TYPE_UINT32 label: LABEL_OPTIONAL }
  field {
    name: "tension" json_name: "tension" number: 3 type: TYPE_FLOAT label: LABEL_OPTIONAL
    oneof_index: 1 proto3_optional: true
  }
  field {
    name: "dyed" json_name: "dyed" number: 4 type: TYPE_STRING label: LABEL_OPTIONAL oneof_index: 0
  }
  oneof_decl { name: "colour" }
  oneof_decl { name: "_tension" }
  nested_type { name: "Thread" }
  reserved_range { start: 9 end: 11 }
  reserved_name: "old_width"
}
message_type { name: "WeaveResponse" }
enum_type {
  name: "Fibre"
  value { name: "FIBRE_UNSPECIFIED" number: 0 }
  value { name: "FIBRE_WOOL" number: 1 }
  value { name: "FIBRE_SILK" number: 2 }
  reserved_range { start: 7 end: 7 }
}
service {
  name: "LoomService"
  method {
    name: "Weave"
    input_type: ".treadle.loom.v1.WeaveRequest"
    output_type: ".treadle.loom.v1.WeaveResponse"
    server_streaming: true
  }
}
"""
Change = Callable[[FileDescriptorProto], None]


def base() -> FileDescriptorProto:
    return text_format.Parse(BASE, FileDescriptorProto())


def request(file: FileDescriptorProto) -> DescriptorProto:
    return file.message_type[0]


def field(file: FileDescriptorProto, name: str) -> FieldDescriptorProto:
    return next(f for f in request(file).field if f.name == name)


def fibre(file: FileDescriptorProto) -> EnumDescriptorProto:
    return file.enum_type[0]


def rules_broken_by(change: Change) -> list[str]:
    changed = base()
    change(changed)
    found = breakages(FileDescriptorSet(file=[base()]), FileDescriptorSet(file=[changed]))
    return [breakage.rule for breakage in found]


def delete_field(file: FileDescriptorProto) -> None:
    request(file).field.remove(field(file, "rows"))


def delete_field_keeping_the_number(file: FileDescriptorProto) -> None:
    delete_field(file)
    request(file).reserved_range.add(start=2, end=3)


def reuse_number(file: FileDescriptorProto) -> None:
    delete_field(file)
    request(file).field.add(
        name="columns",
        json_name="columns",
        number=2,
        type=FieldDescriptorProto.TYPE_BYTES,
        label=FieldDescriptorProto.LABEL_OPTIONAL,
    )


def make_field_repeated(file: FileDescriptorProto) -> None:
    field(file, "rows").label = FieldDescriptorProto.LABEL_REPEATED


def drop_presence(file: FileDescriptorProto) -> None:
    field(file, "tension").ClearField("proto3_optional")
    field(file, "tension").ClearField("oneof_index")


def leave_oneof(file: FileDescriptorProto) -> None:
    field(file, "dyed").ClearField("oneof_index")


def forget_reserved_numbers(file: FileDescriptorProto) -> None:
    del request(file).reserved_range[:]


def forget_reserved_name(file: FileDescriptorProto) -> None:
    del request(file).reserved_name[:]


def forget_reserved_enum_number(file: FileDescriptorProto) -> None:
    del fibre(file).reserved_range[:]


def delete_nested_message(file: FileDescriptorProto) -> None:
    del request(file).nested_type[:]


def change_package(file: FileDescriptorProto) -> None:
    file.package = "treadle.loom.v2"


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        (delete_field, ["FIELD_DELETED"]),
        (delete_field_keeping_the_number, ["FIELD_DELETED"]),
        (lambda f: setattr(field(f, "rows"), "number", 12), ["FIELD_RENUMBERED"]),
        (lambda f: setattr(field(f, "rows"), "name", "lines"), ["FIELD_RENAMED"]),
        (reuse_number, ["FIELD_JSON_NAME_CHANGED", "FIELD_RENAMED", "FIELD_TYPE_CHANGED"]),
        (
            lambda f: setattr(field(f, "rows"), "type", FieldDescriptorProto.TYPE_SINT32),
            ["FIELD_TYPE_CHANGED"],
        ),
        (make_field_repeated, ["FIELD_CARDINALITY_CHANGED"]),
        (drop_presence, ["FIELD_CARDINALITY_CHANGED"]),
        (leave_oneof, ["FIELD_MOVED_ONEOF"]),
        (lambda f: setattr(field(f, "rows"), "json_name", "Rows"), ["FIELD_JSON_NAME_CHANGED"]),
        (forget_reserved_numbers, ["RESERVED_DELETED"]),
        (forget_reserved_name, ["RESERVED_DELETED"]),
        (forget_reserved_enum_number, ["RESERVED_DELETED"]),
        (lambda f: f.message_type.pop(), ["MESSAGE_DELETED"]),
        (delete_nested_message, ["MESSAGE_DELETED"]),
        (lambda f: f.enum_type.pop(), ["ENUM_DELETED"]),
        (lambda f: fibre(f).value.pop(), ["ENUM_VALUE_DELETED"]),
        (lambda f: setattr(fibre(f).value[2], "number", 3), ["ENUM_VALUE_RENUMBERED"]),
        (lambda f: setattr(fibre(f).value[2], "name", "FIBRE_FLAX"), ["ENUM_VALUE_RENAMED"]),
        (lambda f: f.service.pop(), ["SERVICE_DELETED"]),
        (lambda f: f.service[0].method.pop(), ["METHOD_DELETED"]),
        (
            lambda f: setattr(f.service[0].method[0], "server_streaming", False),
            ["METHOD_SERVER_STREAMING_CHANGED"],
        ),
        (
            lambda f: setattr(f.service[0].method[0], "client_streaming", True),
            ["METHOD_CLIENT_STREAMING_CHANGED"],
        ),
        (
            lambda f: setattr(f.service[0].method[0], "input_type", ".treadle.loom.v1.Other"),
            ["METHOD_REQUEST_CHANGED"],
        ),
        (
            lambda f: setattr(f.service[0].method[0], "output_type", ".treadle.loom.v1.Other"),
            ["METHOD_RESPONSE_CHANGED"],
        ),
        (
            change_package,
            [
                "ENUM_DELETED",
                "SERVICE_DELETED",
                "MESSAGE_DELETED",
                "MESSAGE_DELETED",
                "MESSAGE_DELETED",
            ],
        ),
    ],
)
def test_a_breaking_change_is_found(change: Change, rules: list[str]) -> None:
    assert rules_broken_by(change) == rules


def bury_field(file: FileDescriptorProto) -> None:
    delete_field_keeping_the_number(file)
    request(file).reserved_name.append("rows")


def bury_enum_value(file: FileDescriptorProto) -> None:
    fibre(file).value.pop()
    fibre(file).reserved_range.add(start=2, end=2)
    fibre(file).reserved_name.append("FIBRE_SILK")


def extend_everything(file: FileDescriptorProto) -> None:
    request(file).field.add(
        name="weft", json_name="weft", number=5, type=FieldDescriptorProto.TYPE_BYTES
    )
    request(file).reserved_range.add(start=20, end=30)
    file.message_type.add(name="RestRequest")
    fibre(file).value.add(name="FIBRE_FLAX", number=3)
    file.service[0].method.add(name="Rest", input_type=".treadle.loom.v1.RestRequest")
    file.service.add(name="DyeService")


def deprecate(file: FileDescriptorProto) -> None:
    field(file, "rows").options.deprecated = True


@pytest.mark.parametrize("change", [bury_field, bury_enum_value, extend_everything, deprecate])
def test_an_allowed_change_is_not_called_breaking(change: Change) -> None:
    assert rules_broken_by(change) == []


def test_a_breakage_names_its_place_and_the_fix() -> None:
    changed = base()
    delete_field(changed)
    (found,) = breakages(FileDescriptorSet(file=[base()]), FileDescriptorSet(file=[changed]))
    assert str(found) == (
        'treadle.loom.v1.WeaveRequest.rows: FIELD_DELETED: missing `reserved 2; reserved "rows";`'
    )


def test_the_contract_does_not_break_itself() -> None:
    assert breakages(current_set(), current_set()) == ()


def test_deleting_any_field_of_the_contract_is_found() -> None:
    for f, file in enumerate(current_set().file):
        for m, message in enumerate(file.message_type):
            for i, gone in enumerate(message.field):
                changed = current_set()
                del changed.file[f].message_type[m].field[i]
                found = breakages(current_set(), changed)
                expected = ["FIELD_DELETED"] if file.package.startswith("treadle.") else []
                assert [b.rule for b in found] == expected, (message.name, gone.name)
