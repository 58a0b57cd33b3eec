"""The keys of the tree, derived from its models: which exist, their types, and similar names.

A key is the dotted path of a leaf. Below a leaf that is a table are names that the user chose; each
is a key (`agent.loops.mine`). The fields of all variants (`sync.transport.chunk_bytes`) are keys;
the tree itself checks that a field belongs to the chosen variant.
"""

import difflib
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from treadle.trainer.config.schema import Config

__all__ = ["Leaf", "SectionNode", "all_leaves", "all_sections", "flatten", "leaf_of", "nearest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One setting."""

    key: str
    type: Any
    """Without Annotated."""
    field: FieldInfo
    variants: tuple[str, ...] = ()
    """Values of the section's `kind` that have this field; empty where there is no choice."""

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.field.is_required()

    @property
    def default(self) -> Any:
        """The value if none is set."""
        return None if self.field.default is PydanticUndefined else self.field.default

    @property
    def doc(self) -> str:
        """Its description as one line."""
        return " ".join((self.field.description or "").split())

    @property
    def is_table(self) -> bool:
        """Whether it maps names that the user chooses to values."""
        return get_origin(self.type) is Mapping

    @property
    def alternatives(self) -> tuple[Any, ...]:
        """The types of its union, or its one type."""
        return _members(self.type)

    def takes(self, *wanted: type) -> bool:
        """Returns whether one of its alternatives is one of `wanted`, or a literal of that type."""
        return any(
            member in wanted
            or (get_origin(member) is Literal and isinstance(get_args(member)[0], wanted))
            for member in self.alternatives
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionNode:
    """A node above leaves; `kinds` maps each variant's name to its model, or is empty."""

    key: str
    doc: str
    kinds: Mapping[str, type[BaseModel]]


def _members(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(member for arg in get_args(annotation) for member in _members(arg))
    return (annotation,)


def _models(annotation: Any) -> tuple[type[BaseModel], ...]:
    return tuple(
        member
        for member in _members(annotation)
        if isinstance(member, type) and issubclass(member, BaseModel)
    )


def _kind_of(model: type[BaseModel]) -> str:
    return str(model.model_fields["kind"].default)


def _walk(model: type[BaseModel], prefix: str) -> Iterator[Leaf | SectionNode]:
    # A section's own leaves come first, so that each section is one part of a listing.
    fields = sorted(
        model.model_fields.items(), key=lambda named: bool(_models(named[1].annotation))
    )
    for name, field in fields:
        key = f"{prefix}{name}"
        models = _models(field.annotation)
        if not models:
            annotation = _members(field.annotation)
            type_ = annotation[0] if len(annotation) == 1 else field.annotation
            yield Leaf(key=key, type=type_, field=field)
        elif len(models) == 1:
            doc = (models[0].__doc__ or "").strip()
            yield SectionNode(key=key, doc=doc, kinds={})
            yield from _walk(models[0], f"{key}.")
        else:
            kinds = {_kind_of(variant): variant for variant in models}
            yield SectionNode(key=key, doc=field.description or "", kinds=kinds)
            yield from _variant_leaves(kinds, key, field)


def _variant_leaves(
    kinds: Mapping[str, type[BaseModel]], key: str, field: FieldInfo
) -> Iterator[Leaf | SectionNode]:
    kind_field = FieldInfo(
        annotation=str,
        default=field.default.kind,
        description=f"{field.description or 'Which variant'} ({' | '.join(kinds)})",
    )
    yield Leaf(key=f"{key}.kind", type=Literal[tuple(kinds)], field=kind_field)
    leaves: dict[str, Leaf] = {}
    for kind, variant in kinds.items():
        for entry in _walk(variant, f"{key}."):
            if isinstance(entry, Leaf) and entry.key != f"{key}.kind":
                owners = leaves[entry.key].variants if entry.key in leaves else ()
                leaves[entry.key] = replace(entry, variants=(*owners, kind))
    for leaf in leaves.values():  # a field of all variants needs no note
        yield leaf if len(leaf.variants) < len(kinds) else replace(leaf, variants=())


@cache
def all_leaves(root: type[BaseModel] = Config) -> Mapping[str, Leaf]:
    """Returns every key of a tree: of each section its own keys, then those of the ones below."""
    leaves: dict[str, Leaf] = {}
    for entry in _walk(root, ""):
        if isinstance(entry, Leaf):
            leaves[entry.key] = entry
    return leaves


@cache
def all_sections(root: type[BaseModel] = Config) -> Mapping[str, SectionNode]:
    """Returns every node above the leaves, in the order of the tree."""
    return {entry.key: entry for entry in _walk(root, "") if isinstance(entry, SectionNode)}


def leaf_of(key: str, root: type[BaseModel] = Config) -> Leaf | None:
    """Returns the leaf that a key sets: that leaf, or the table that the key is an entry of.

    In a table of numbers the name of an entry may have dots, as that of a file has.
    """
    leaves = all_leaves(root)
    if (leaf := leaves.get(key)) is not None:
        return leaf
    above = key.rpartition(".")[0]
    if (leaf := leaves.get(above)) is not None:
        return leaf if leaf.is_table else None
    while above := above.rpartition(".")[0]:
        if (leaf := leaves.get(above)) is not None:
            return leaf if leaf.is_table and get_args(leaf.type)[1] is float else None
    return None


def flatten(
    tree: Mapping[str, Any], prefix: str = "", root: type[BaseModel] = Config
) -> dict[str, Any]:
    """Returns the values of a dumped configuration by key; a table's entry may be a mapping."""
    values: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        leaf = leaf_of(key, root)
        if isinstance(value, Mapping) and (leaf is None or leaf.key == key):
            values |= flatten(value, f"{key}.", root)
        else:
            values[key] = value
    return values


def nearest(key: str, among: Iterable[str], *, limit: int = 3) -> list[str]:
    """Returns the known keys most similar to `key`, by the whole key or by its last part.

    A key that is nearly right has one suggestion.
    """
    tail = key.rpartition(".")[2]
    whole = {known: difflib.SequenceMatcher(None, key, known).ratio() for known in among}

    def likeness(known: str) -> float:
        last = difflib.SequenceMatcher(None, tail, known.rpartition(".")[2]).ratio()
        return max(whole[known], 0.95 * last)

    # Beside a typing error of one or two letters, the others are noise.
    is_typing_error = max(whole.values(), default=0.0) >= 0.9
    found = whole if is_typing_error else {known: likeness(known) for known in whole}
    best = max(found.values(), default=0.0)
    floor = 0.6 if best < 0.9 else best - 0.02
    ranked = sorted(((ratio, known) for known, ratio in found.items()), reverse=True)
    return [known for ratio, known in ranked[:limit] if ratio >= floor]
