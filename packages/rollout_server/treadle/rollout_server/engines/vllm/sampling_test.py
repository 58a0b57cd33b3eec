import json
from dataclasses import replace
from typing import Any

import pytest

from treadle.rollout_server.engine import (
    Constraint,
    ConstraintForm,
    EngineRequest,
    Sampling,
    Tag,
    TaggedText,
)
from treadle.rollout_server.engines.vllm.sampling import (
    sampling_of,
    sampling_params,
    structured_outputs,
)
from treadle.rollout_server.errors import InvalidField

EOS = frozenset({3, 4})


def translated(*, logprobs: bool = False, **sampling: Any) -> dict[str, Any]:
    request = EngineRequest(
        request_id="r",
        prompt=(1,),
        sampling=Sampling(**{"max_tokens": 5} | sampling),
        logprobs=logprobs,
    )
    return sampling_params(request, EOS)


def test_how_a_token_is_drawn_reaches_our_sampler_as_it_is() -> None:
    values: dict[str, Any] = {
        "temperature": 3.5,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.1,
        "seed": 2**64 - 1,
    }
    sent = translated(**values)
    assert sampling_of(sent["extra_args"]) == Sampling(max_tokens=1, **values)
    assert not sent.keys() & {"temperature", "top_k", "top_p", "min_p", "seed"}


def test_without_a_seed_each_sequence_has_its_own() -> None:
    seeds = {sampling_of(translated()["extra_args"]).seed for _ in range(8)}
    assert len(seeds) == 8 and None not in seeds


def test_the_ids_that_end_a_completion_are_ours_to_name() -> None:
    assert translated()["stop_token_ids"] == [3, 4]
    assert translated(stop_token_ids=frozenset({9}))["stop_token_ids"] == [3, 4, 9]
    ignoring = translated(stop_token_ids=frozenset({9}), ignore_eos=True)
    assert (ignoring["stop_token_ids"], ignoring["ignore_eos"]) == ([9], True)


def test_only_the_sampled_ids_logprob_is_asked_for() -> None:
    assert translated()["logprobs"] is None
    assert translated(logprobs=True)["logprobs"] == 0


def test_each_form_of_a_constraint_has_its_argument() -> None:
    told = [
        structured_outputs(Constraint(form=form, texts=("a", "b")))
        for form in (ConstraintForm.JSON_SCHEMA, ConstraintForm.REGEX, ConstraintForm.GRAMMAR)
    ]
    assert told == [{"json": "a"}, {"regex": "a"}, {"grammar": "a"}]
    choices = Constraint(form=ConstraintForm.CHOICES, texts=("a", "b"))
    assert structured_outputs(choices) == {"choice": ["a", "b"]}


def test_tagged_text_is_a_structural_tag() -> None:
    tag = Tag(begin="<f ", json_schema='{"type": "object"}', end=">")
    tagged = TaggedText(tags=(tag,), trigger="<f", required=True)
    told = structured_outputs(Constraint(form=ConstraintForm.TAGGED, tagged=tagged))
    assert json.loads(told["structural_tag"])["format"] == {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [
            {
                "type": "tag",
                "begin": "<f ",
                "content": {"type": "json_schema", "json_schema": {"type": "object"}},
                "end": ">",
            }
        ],
        "at_least_one": True,
        "stop_after_first": False,
    }
    broken = replace(tagged, tags=(replace(tag, json_schema="{"),))
    with pytest.raises(InvalidField, match=r"a JSON Schema"):
        structured_outputs(Constraint(form=ConstraintForm.TAGGED, tagged=broken))
