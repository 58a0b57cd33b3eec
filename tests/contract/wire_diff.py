"""Finds what a change of the contract breaks by comparing two descriptor sets.

A breakage is a change after which a program built against the old contract can no longer talk to
one built against the new: on the wire, in JSON, or by the names its code uses. Additions never are.
A field or an enum value may go only if its number and its name stay behind as `reserved`, so that
neither comes back as something else; a message, an enum, a service or a method may not go at all:
that is what a `v2` package is for.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)

PACKAGE_PREFIX = "treadle."


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakage:
    """A promise of the old contract that the new one does not keep."""

    rule: str
    symbol: str
    detail: str

    def __str__(self) -> str:
        return f"{self.symbol}: {self.rule}: {self.detail}"


class _Range(Protocol):
    start: int
    end: int


_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class _Symbols:
    """The contract by full name, with nested messages and enums next to outer ones."""

    messages: Mapping[str, DescriptorProto]
    enums: Mapping[str, EnumDescriptorProto]
    services: Mapping[str, ServiceDescriptorProto]


def breakages(old: FileDescriptorSet, new: FileDescriptorSet) -> tuple[Breakage, ...]:
    """Returns every breakage between two versions of our packages, ordered by symbol."""
    before, after = _symbols(old), _symbols(new)
    found = [
        *_pairs("MESSAGE_DELETED", before.messages, after.messages, _message),
        *_pairs("ENUM_DELETED", before.enums, after.enums, _enum),
        *_pairs("SERVICE_DELETED", before.services, after.services, _service),
    ]
    return tuple(sorted(found, key=lambda breakage: (breakage.symbol, breakage.rule)))


def _symbols(files: FileDescriptorSet) -> _Symbols:
    messages: dict[str, DescriptorProto] = {}
    enums: dict[str, EnumDescriptorProto] = {}
    services: dict[str, ServiceDescriptorProto] = {}

    def add(scope: str, message: DescriptorProto) -> None:
        name = f"{scope}.{message.name}"
        messages[name] = message
        enums.update({f"{name}.{enum.name}": enum for enum in message.enum_type})
        for nested in message.nested_type:
            add(name, nested)

    for file in files.file:
        if not file.package.startswith(PACKAGE_PREFIX):
            continue
        for message in file.message_type:
            add(file.package, message)
        enums.update({f"{file.package}.{enum.name}": enum for enum in file.enum_type})
        services.update({f"{file.package}.{service.name}": service for service in file.service})
    return _Symbols(messages, enums, services)


def _pairs(
    deleted: str,
    before: Mapping[str, _Item],
    after: Mapping[str, _Item],
    compare: Callable[[str, _Item, _Item], Iterator[Breakage]],
) -> Iterator[Breakage]:
    for name, item in before.items():
        if name in after:
            yield from compare(name, item, after[name])
        else:
            yield Breakage(
                rule=deleted, symbol=name, detail="clients of the old contract still use it"
            )


def _message(name: str, old: DescriptorProto, new: DescriptorProto) -> Iterator[Breakage]:
    by_number = {field.number: field for field in new.field}
    numbers_of = {field.name: field.number for field in new.field}
    for field in old.field:
        symbol = f"{name}.{field.name}"
        if field.number in by_number:
            yield from _field(symbol, old, field, new, by_number[field.number])
        elif field.name in numbers_of:
            detail = f"number {field.number} became {numbers_of[field.name]}"
            yield Breakage(rule="FIELD_RENUMBERED", symbol=symbol, detail=detail)
        else:
            kept = _holds(new.reserved_range, field.number, inclusive=False)
            if missing := _missing_tombstones(field.number, kept, field.name, new.reserved_name):
                yield Breakage(rule="FIELD_DELETED", symbol=symbol, detail=missing)
    yield from _reservations(name, old, new, inclusive=False)


def _field(
    symbol: str,
    old_message: DescriptorProto,
    old: FieldDescriptorProto,
    new_message: DescriptorProto,
    new: FieldDescriptorProto,
) -> Iterator[Breakage]:
    def type_of(field: FieldDescriptorProto) -> str:
        return field.type_name or FieldDescriptorProto.Type.Name(field.type)

    def oneof_of(message: DescriptorProto, field: FieldDescriptorProto) -> str:
        if not field.HasField("oneof_index") or field.proto3_optional:
            return ""
        return message.oneof_decl[field.oneof_index].name

    def cardinality(field: FieldDescriptorProto) -> str:
        if field.proto3_optional:
            return "optional"
        return "repeated" if field.label == FieldDescriptorProto.LABEL_REPEATED else "singular"

    for rule, before, after in (
        ("FIELD_RENAMED", old.name, new.name),
        ("FIELD_TYPE_CHANGED", type_of(old), type_of(new)),
        ("FIELD_CARDINALITY_CHANGED", cardinality(old), cardinality(new)),
        ("FIELD_MOVED_ONEOF", oneof_of(old_message, old), oneof_of(new_message, new)),
        ("FIELD_JSON_NAME_CHANGED", old.json_name, new.json_name),
    ):
        if before != after:
            yield Breakage(rule=rule, symbol=symbol, detail=f"{before!r} became {after!r}")


def _enum(name: str, old: EnumDescriptorProto, new: EnumDescriptorProto) -> Iterator[Breakage]:
    names_of: dict[int, set[str]] = {}
    for value in new.value:
        names_of.setdefault(value.number, set()).add(value.name)
    numbers_of = {value.name: value.number for value in new.value}
    for value in old.value:
        symbol = f"{name}.{value.name}"
        if value.name in numbers_of:
            if numbers_of[value.name] != value.number:
                detail = f"number {value.number} became {numbers_of[value.name]}"
                yield Breakage(rule="ENUM_VALUE_RENUMBERED", symbol=symbol, detail=detail)
        elif value.number in names_of:
            detail = f"number {value.number} is now {min(names_of[value.number])}"
            yield Breakage(rule="ENUM_VALUE_RENAMED", symbol=symbol, detail=detail)
        else:
            kept = _holds(new.reserved_range, value.number, inclusive=True)
            if missing := _missing_tombstones(value.number, kept, value.name, new.reserved_name):
                yield Breakage(rule="ENUM_VALUE_DELETED", symbol=symbol, detail=missing)
    yield from _reservations(name, old, new, inclusive=True)


def _service(
    name: str, old: ServiceDescriptorProto, new: ServiceDescriptorProto
) -> Iterator[Breakage]:
    def by_name(service: ServiceDescriptorProto) -> dict[str, MethodDescriptorProto]:
        return {f"{name}.{method.name}": method for method in service.method}

    yield from _pairs("METHOD_DELETED", by_name(old), by_name(new), _method)


def _method(
    name: str, old: MethodDescriptorProto, new: MethodDescriptorProto
) -> Iterator[Breakage]:
    for rule, before, after in (
        ("METHOD_REQUEST_CHANGED", old.input_type, new.input_type),
        ("METHOD_RESPONSE_CHANGED", old.output_type, new.output_type),
        ("METHOD_CLIENT_STREAMING_CHANGED", old.client_streaming, new.client_streaming),
        ("METHOD_SERVER_STREAMING_CHANGED", old.server_streaming, new.server_streaming),
    ):
        if before != after:
            yield Breakage(rule=rule, symbol=name, detail=f"{before!r} became {after!r}")


def _reservations(
    name: str,
    old: DescriptorProto | EnumDescriptorProto,
    new: DescriptorProto | EnumDescriptorProto,
    *,
    inclusive: bool,
) -> Iterator[Breakage]:
    for reserved in old.reserved_range:
        last = reserved.end if inclusive else reserved.end - 1
        if not all(
            _holds(new.reserved_range, edge, inclusive=inclusive) for edge in (reserved.start, last)
        ):
            detail = f"numbers {reserved.start} to {last} can be used again"
            yield Breakage(rule="RESERVED_DELETED", symbol=name, detail=detail)
    for gone in sorted(set(old.reserved_name) - set(new.reserved_name)):
        detail = f"the name {gone!r} can be used again"
        yield Breakage(rule="RESERVED_DELETED", symbol=name, detail=detail)


def _holds(ranges: Iterable[_Range], number: int, *, inclusive: bool) -> bool:
    """Whether a number is reserved; in enums a range includes its end, in messages it does not."""
    return any(r.start <= number < r.end + inclusive for r in ranges)


def _missing_tombstones(
    number: int, number_kept: bool, name: str, reserved_names: Iterable[str]
) -> str:
    lines = [] if number_kept else [f"reserved {number};"]
    if name not in reserved_names:
        lines.append(f'reserved "{name}";')
    return f"missing `{' '.join(lines)}`" if lines else ""
