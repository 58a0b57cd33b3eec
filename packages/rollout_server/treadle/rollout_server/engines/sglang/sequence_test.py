import math
from dataclasses import replace
from typing import Any

import pytest

from treadle.rollout_server.engine import (
    Constraint,
    ConstraintForm,
    EngineEvent,
    EngineRequest,
    Finished,
    FinishReason,
    PromptImage,
    PromptLogprobs,
    Sampling,
    Started,
    Tokens,
)
from treadle.rollout_server.engines.sglang.sequence import (
    EXPERTS_KEY,
    MASKS_KEY,
    Sequence,
    check_supported,
    logprob_start,
    sampling_params,
)
from treadle.rollout_server.errors import InvalidField

EOS = frozenset({3})


def request(*, logprobs: bool = True, **sampling: Any) -> EngineRequest:
    settings = Sampling(**{"max_tokens": 4} | sampling)
    return EngineRequest(request_id="r", prompt=(1, 2), sampling=settings, logprobs=logprobs)


def answer(count: int, reason: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    """Cumulative, with lists that hold more by the time that it is read."""
    return {
        "output_ids": [10, 11, 12, 13, 14],
        "meta_info": {
            "completion_tokens": count,
            "cached_tokens": 1,
            "finish_reason": reason,
            "output_token_logprobs": [(-0.1 * n, n, None) for n in range(5)],
        }
        | meta,
    }


def read(sequence: Sequence, given: dict[str, Any], version: int = 0) -> list[EngineEvent]:
    return list(sequence.read(given, version))


def test_answers_become_events_once() -> None:
    sequence = Sequence(request(), "1")
    assert read(sequence, answer(2)) == [Started(1), Tokens((10, 11), (-0.0, -0.1), 0)]
    assert read(sequence, answer(2)) == []
    assert read(sequence, answer(4, {"type": "length"})) == [
        Tokens((12, 13), (-0.2, -0.1 * 3), 0),
        Finished(FinishReason.LENGTH),
    ]


def test_experts_and_masks_come_with_the_tokens_for_those_who_ask() -> None:
    told: dict[str, Any] = {EXPERTS_KEY: [b"abc", b"d", b"e", b"f"], MASKS_KEY: [b"", b"h", b"i"]}
    sequence = Sequence(replace(request(), routed_experts_from=0, sampling_mask=True), "1")
    sequence.mark(1, 0)
    events = read(sequence, answer(3, **told), 1)
    told[MASKS_KEY].append(b"j")
    events += read(sequence, answer(4, {"type": "length"}, **told), 1)
    tokens = [event for event in events if isinstance(event, Tokens)]
    assert [event.routed_experts for event in tokens] == [b"abc", b"de", b"f"]
    assert [event.sampling_masks for event in tokens] == [(b"",), (b"h", b"i"), (b"j",)]
    others: dict[str, Any] = {key: [None, None] for key in (EXPERTS_KEY, MASKS_KEY)}
    plain = read(Sequence(request(), "1"), answer(2, **others))
    assert plain[1] == Tokens((10, 11), (-0.0, -0.1), 0)


def test_logprobs_of_the_prompt_come_once_before_the_first_token() -> None:
    wanted = replace(request(), prompt=(1, 2, 3), prompt_logprobs_from=1)
    assert (logprob_start(wanted), logprob_start(request())) == (0, -1)
    sequence = Sequence(wanted, "1")
    sequence.mark(1, 5)
    prompt = [(None, 1, None), (-1.0, 2, None), (-2.0, 3, None)]
    assert read(sequence, answer(0, input_token_logprobs=[]), 6) == [Started(1)]
    assert read(sequence, answer(2, input_token_logprobs=prompt), 6) == [
        PromptLogprobs((-1.0, -2.0), 5),
        Tokens((10,), (-0.0,), 5),
        Tokens((11,), (-0.1,), 6),
    ]
    assert read(sequence, answer(3, input_token_logprobs=prompt), 6) == [Tokens((12,), (-0.2,), 6)]


def test_logprobs_of_the_prompt_that_are_not_finite_are_an_error() -> None:
    sequence = Sequence(replace(request(), prompt_logprobs_from=1), "1")
    prompt = [(None, 1, None), (math.nan, 2, None)]
    with pytest.raises(FloatingPointError, match="not finite"):
        read(sequence, answer(1, input_token_logprobs=prompt))


def test_tokens_before_a_mark_are_older() -> None:
    sequence = Sequence(request(logprobs=False), "1")
    sequence.mark(1, 5)
    sequence.mark(1, 6)
    sequence.mark(3, 7)
    assert read(sequence, answer(4), 8)[1:] == [
        Tokens((10,), (), 5),
        Tokens((11, 12), (), 7),
        Tokens((13,), (), 8),
    ]


def test_an_abort_that_was_wanted_is_an_interruption() -> None:
    sequence = Sequence(request(), "1")
    sequence.interrupted = True
    end = answer(0, {"type": "abort", "message": "x"})
    del end["meta_info"]["cached_tokens"]
    assert read(sequence, end) == [Started(0), Finished(FinishReason.INTERRUPTED)]


@pytest.mark.parametrize("reason", [{"type": "abort", "message": "no room"}, {"type": "length"}])
def test_an_end_of_sglangs_own_is_a_failure(reason: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="ended a sequence after 2 of 4 tokens"):
        read(Sequence(request(), "1"), answer(2, reason))


def test_a_stop_ends_it() -> None:
    end = read(Sequence(request(), "1"), answer(1, {"type": "stop", "matched": 10}))
    assert end[-1] == Finished(FinishReason.STOP)


def test_a_logprob_that_is_not_finite_is_a_failure() -> None:
    broken = answer(1, output_token_logprobs=[(float("nan"), 10, None)])
    with pytest.raises(FloatingPointError, match="the weights are broken"):
        read(Sequence(request(logprobs=False), "1"), broken)


def test_sglang_is_told_where_to_end() -> None:
    ours = request(stop_token_ids=frozenset({7}), seed=5)
    told = sampling_params(ours, EOS)
    assert (told["stop_token_ids"], told["max_new_tokens"]) == ([3, 7], 4)
    ignored = sampling_params(request(ignore_eos=True), EOS)
    assert ignored["stop_token_ids"] == []
    assert told["custom_params"]["treadle"] == {
        "temperature": 1.0,
        "top_k": None,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": 5,
        "masked": False,
    }


def test_a_request_without_a_seed_gets_another_one_each_time() -> None:
    seeds = {sampling_params(request(), EOS)["custom_params"]["treadle"]["seed"] for _ in range(9)}
    assert len(seeds) == 9


def test_logprobs_of_placeholders_are_refused() -> None:
    image = PromptImage(data=b"", media_type="image/png", start=2, num_tokens=3)
    seen = replace(request(), prompt=tuple(range(8)), images=(image,))
    for accepted in (seen, replace(seen, prompt_logprobs_from=5)):
        check_supported(accepted)
    check_supported(replace(request(), prompt_logprobs_from=1))
    with pytest.raises(InvalidField, match="prompt_logprobs_from is 4, expected 5 or more"):
        check_supported(replace(seen, prompt_logprobs_from=4))


def test_constraints_are_sglangs_parameters_and_choices_a_grammar() -> None:
    def given(form: ConstraintForm, *texts: str) -> dict[str, Any]:
        constrained = replace(request(), constraint=Constraint(form=form, texts=texts))
        return {**sampling_params(constrained, EOS)}

    assert given(ConstraintForm.JSON_SCHEMA, "{}")["json_schema"] == "{}"
    assert given(ConstraintForm.REGEX, "a")["regex"] == "a"
    assert given(ConstraintForm.GRAMMAR, "root ::= b")["ebnf"] == "root ::= b"
    grammar = given(ConstraintForm.CHOICES, 'a"b', "c\\d\n", "\N{SNOWMAN}")["ebnf"]
    assert grammar == 'root ::= "a\\"b" | "c\\\\d\\n" | "\N{SNOWMAN}"'
    assert not {"json_schema", "regex", "ebnf"} & sampling_params(request(), EOS).keys()


def test_what_sglang_refuses_is_the_constraint() -> None:
    refused = answer(0, {"type": "abort", "status_code": 400, "message": "bad rule"})
    constraint = Constraint(form=ConstraintForm.REGEX, texts=("(",))
    with pytest.raises(InvalidField, match="bad rule"):
        read(Sequence(replace(request(), constraint=constraint), "1"), refused)
    with pytest.raises(RuntimeError, match="bad rule"):
        read(Sequence(request(), "2"), refused)
    interrupted = Sequence(replace(request(), constraint=constraint), "3")
    interrupted.interrupted = True
    assert read(interrupted, refused)[-1] == Finished(FinishReason.INTERRUPTED)
