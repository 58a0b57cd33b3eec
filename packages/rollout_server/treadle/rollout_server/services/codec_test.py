"""Bounds of repeated fields."""

from dataclasses import replace
from typing import Any

import pytest

from treadle.rollout.v1 import generation_service_pb2 as gen
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout.v1 import weight_sync_service_pb2 as sync
from treadle.rollout_server.engine import (
    Constraint,
    ConstraintForm,
    EngineCapabilities,
    EngineInfo,
    MemoryKind,
    Tag,
    TaggedText,
)
from treadle.rollout_server.errors import CapabilityMissing, InvalidField
from treadle.rollout_server.services import codec
from treadle.rollout_server.services.codec import (
    decode_generate,
    decode_memory_kinds,
    decode_tensors,
)
from treadle.rollout_server.services.testing import MODEL, want

INFO = EngineInfo(
    name="e", version="1", model=MODEL, capabilities=EngineCapabilities(sampled_logprobs=True)
)


class Counted(list[Any]):
    """Values that nobody may look at."""

    def __iter__(self) -> Any:
        raise AssertionError("these are to be counted and nothing else")


def test_there_are_no_more_stop_ids_than_tokens() -> None:
    request = want()
    request.sampling.stop_token_ids.extend([1] * MODEL.vocab_size)
    assert decode_generate(request, INFO).sampling.stop_token_ids == {1}
    request.sampling.stop_token_ids.append(1)
    says = r"^sampling.stop_token_ids is 65 values, expected at most 64$"
    with pytest.raises(InvalidField, match=says):
        decode_generate(request, INFO)


def test_memory_kinds_are_counted_before_they_are_read() -> None:
    assert decode_memory_kinds([srv.MEMORY_KIND_WEIGHTS] * 16) == {MemoryKind.WEIGHTS}
    with pytest.raises(InvalidField, match="kinds is 17 values, expected at most 16"):
        decode_memory_kinds(Counted([srv.MEMORY_KIND_WEIGHTS] * 17))


def test_tensors_are_counted_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_TENSORS", 2)
    spec = sync.TensorSpec(name="a", element_type=sync.ELEMENT_TYPE_FLOAT32)
    assert len(decode_tensors([spec] * 2)) == 2
    with pytest.raises(InvalidField, match="tensors is 3 values, expected at most 2"):
        decode_tensors(Counted([spec] * 3))


def test_a_tensor_has_no_more_dimensions_than_a_tensor_can_have() -> None:
    spec = sync.TensorSpec(name="a", element_type=sync.ELEMENT_TYPE_FLOAT32, shape=[1] * 64)
    assert len(decode_tensors([spec])[0].shape) == 64
    spec.shape.append(1)
    with pytest.raises(InvalidField, match=r"tensors\[0\].shape is 65 values, expected at most 64"):
        decode_tensors([spec])


def test_a_constraint_has_one_form_that_is_not_empty() -> None:
    able = EngineCapabilities(sampled_logprobs=True, constrained_sampling=True)
    info = replace(INFO, capabilities=able)
    request = want()
    assert decode_generate(request, info).constraint is None
    for form in (gen.Constraint(), gen.Constraint(regex=""), gen.Constraint(choices=gen.Choices())):
        request.constraint.CopyFrom(form)
        with pytest.raises(InvalidField, match=r"^constraint"):
            decode_generate(request, info)
    request.constraint.choices.texts.extend(["a", "b"])
    read = decode_generate(request, info).constraint
    assert read == Constraint(form=ConstraintForm.CHOICES, texts=("a", "b"))
    request.constraint.json_schema = "{}"
    read = decode_generate(request, info).constraint
    assert read == Constraint(form=ConstraintForm.JSON_SCHEMA, texts=("{}",))
    with pytest.raises(CapabilityMissing, match="constrained_sampling"):
        decode_generate(request, INFO)


def test_tagged_text_is_complete() -> None:
    able = EngineCapabilities(sampled_logprobs=True, constrained_sampling=True)
    info = replace(INFO, capabilities=able)
    whole = gen.Tag(begin="<a", json_schema="{}", end=">")
    request = want()
    for tags, trigger, problem in (
        ([], "<", "at least one tag"),
        ([whole], "", "a trigger"),
        ([whole, gen.Tag(begin="a", json_schema="{}", end=">")], "<", r"tags\[1\].begin"),
        ([gen.Tag(begin="<", end=">")], "<", "not empty"),
        ([gen.Tag(begin="<", json_schema="{}")], "<", "not empty"),
    ):
        request.constraint.tagged.CopyFrom(gen.TaggedText(tags=tags, trigger=trigger))
        with pytest.raises(InvalidField, match=problem):
            decode_generate(request, info)
    request.constraint.tagged.CopyFrom(gen.TaggedText(tags=[whole], trigger="<", single=True))
    read = decode_generate(request, info).constraint
    tagged = TaggedText(
        tags=(Tag(begin="<a", json_schema="{}", end=">"),), trigger="<", single=True
    )
    assert read == Constraint(form=ConstraintForm.TAGGED, tagged=tagged)
