"""Sampling: of which weights, with which log-probabilities, repeated and refused."""

import pytest

from treadle.conformance.tinker.checks.training_checks import DATUM, TOKENS, close
from treadle.conformance.tinker.client import Failed, RemoteService


def test_each_sequence_has_a_name(service: RemoteService) -> None:
    """The SDK drops the answer to a promise without them."""
    promise = service.ask(service.sampler(), 0, TOKENS, 3)
    names = promise.get("sample_sequence_ids") or []
    assert len(set(names)) == 3, promise
    service.result(promise)


def test_each_token_has_a_logprob(service: RemoteService) -> None:
    found = service.sample(service.sampler(), 0, TOKENS, 3)
    assert len(found.sequences) == 3
    for tokens, logprobs, stopped in found.sequences:
        assert 1 <= len(tokens) <= 8 and len(logprobs) == len(tokens)
        assert stopped or len(tokens) == 8, "it ends at a stop or at max_tokens"
        assert all(value <= 0.0 for value in logprobs)


def test_a_logprob_of_a_sample_is_that_of_a_prompt(
    service: RemoteService, tolerance: float
) -> None:
    sampler = service.sampler()
    tokens, logprobs, _ = service.sample(sampler, 0, TOKENS).sequences[0]
    scores = service.scores(sampler, 1, [*TOKENS, *tokens])
    assert close(scores[-len(tokens) :], logprobs, tolerance), (scores, logprobs)


def test_seeds_repeat_and_samples_of_one_request_differ(service: RemoteService) -> None:
    sampler = service.sampler()
    one, other = (
        service.sample(sampler, seq, TOKENS, 4, seed=3, temperature=4.0) for seq in (0, 1)
    )
    assert [each[0] for each in one.sequences] == [each[0] for each in other.sequences]
    assert len({tuple(each[0]) for each in one.sequences}) > 1, "all samples are the same"


def test_a_stop_token_is_the_last(service: RemoteService) -> None:
    sampler = service.sampler()
    first = service.sample(sampler, 0, TOKENS, seed=3).sequences[0][0][0]
    found = service.sample(sampler, 1, TOKENS, seed=3, stop=[first])
    assert found.sequences[0][0] == [first] and found.sequences[0][2], found


def test_a_repeated_request_has_the_samples_of_the_first(service: RemoteService) -> None:
    sampler = service.sampler()
    one, other = (service.sample(sampler, 0, TOKENS, 2) for _ in range(2))
    assert one == other


def test_samples_are_of_the_weights_that_are_named(
    service: RemoteService, tolerance: float
) -> None:
    model = service.model().trained(DATUM)
    (trained,) = model.passes([DATUM], forward=True).logprobs
    path = model.request("/save_weights_for_sampler", path="kit")["path"]
    sampler, base = service.sampler(path), service.sampler()
    assert close(service.scores(sampler, 0, TOKENS), trained, 10 * tolerance)
    assert not close(service.scores(base, 0, TOKENS), trained, 10 * tolerance)
    model.trained(DATUM)  # what was saved stays
    assert close(service.scores(sampler, 1, TOKENS), trained, 10 * tolerance)


def test_the_present_weights_are_sampled_without_a_name(
    service: RemoteService, tolerance: float
) -> None:
    model = service.model().trained(DATUM)
    (trained,) = model.passes([DATUM], forward=True).logprobs
    found = model.request("/save_weights_for_sampler", sampling_session_seq_id=1)
    sampler = found["sampling_session_id"]
    assert close(service.scores(sampler, 0, TOKENS), trained, 10 * tolerance)


@pytest.mark.parametrize("what", ["session", "checkpoint", "prompt", "number"])
def test_what_is_wrong_is_the_clients_fault(service: RemoteService, what: str) -> None:
    with pytest.raises(Failed) as raised:
        if what == "session":
            service.sample("no-such-session:sample:0", 0, TOKENS)
        elif what == "checkpoint":
            service.sampler("tinker://no/sampler_weights/such")
        elif what == "prompt":
            long = service.base_model()["max_context_length"] + 1
            service.sample(service.sampler(), 0, [5] * long)
        else:
            service.sample(service.sampler(), 0, TOKENS, 0)
    assert raised.value.of_the_user and str(raised.value), raised.value
