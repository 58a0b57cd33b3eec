"""Passes and steps: their order, their repetition, what they compute."""

import math
from collections.abc import Callable, Mapping, Sequence

import pytest

from treadle.conformance.tinker.client import (
    Failed,
    KitDatum,
    RemoteModel,
    RemoteService,
    read_answer,
)

TOKENS = (5, 6, 7, 8, 9, 10)
WEIGHTS = (0.0, 1.0, 1.0, 2.0, 1.0)
ADVANTAGES = (0.0, 1.0, -1.0, 0.5, 2.0)
DATUM = KitDatum(tokens=TOKENS, inputs={"weights": WEIGHTS})
OTHER = KitDatum(tokens=(11, 5, 12, 6, 13, 7), inputs={"weights": (1.0,) * 5})
_MOVED = (0.0, 0.1, 0.5, -0.5, 0.02)
"""Differences of the log-probabilities of what sampled: ratios inside clips and outside."""
_CUSTOM = (0.0, -0.5, 0.25, 1.0, -2.0)


def close(one: Sequence[float], other: Sequence[float], tolerance: float) -> bool:
    """Returns whether each number differs by no more than the tolerance."""
    return all(abs(a - b) <= tolerance for a, b in zip(one, other, strict=True))


def _logprobs(model: RemoteModel) -> Sequence[float]:
    (found,) = model.passes([DATUM], forward=True).logprobs
    return found


def _sum(weights: Sequence[float], values: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(weights, values, strict=True))


def test_a_model_is_created_and_described(service: RemoteService) -> None:
    model = service.model()
    info = service.post("/get_info", model_id=model.name)
    assert info["model_data"]["model_name"] == service.base_model()["model_name"], info
    assert info.get("lora_rank") == 4, info


def test_a_pass_has_a_logprob_per_position_and_its_sum(
    service: RemoteService, tolerance: float
) -> None:
    found = service.model().passes([DATUM, OTHER])
    assert [len(each) for each in found.logprobs] == [5, 5], found
    assert all(value <= 0.0 for each in found.logprobs for value in each), found
    wanted = -_sum(WEIGHTS, found.logprobs[0]) - sum(found.logprobs[1])
    assert math.isclose(found.metrics["loss:sum"], wanted, rel_tol=1e-4, abs_tol=tolerance), found


def test_forward_computes_what_forward_backward_does(
    service: RemoteService, tolerance: float
) -> None:
    model = service.model()
    forward, both = model.passes([DATUM], forward=True), model.passes([DATUM])
    assert close(forward.logprobs[0], both.logprobs[0], tolerance), (forward, both)


def test_forward_leaves_no_gradient(service: RemoteService, tolerance: float) -> None:
    models = [service.model(), service.model()]
    models[0].passes([OTHER], forward=True)
    for model in models:
        model.trained(DATUM)
    assert close(_logprobs(models[0]), _logprobs(models[1]), tolerance)


def test_a_step_lowers_the_loss(service: RemoteService) -> None:
    model = service.model()
    before = model.passes([DATUM]).metrics["loss:sum"]
    model.step()
    after = model.passes([DATUM], forward=True).metrics["loss:sum"]
    assert after < before, (before, after)


def test_a_step_without_learning_rate_changes_nothing(
    service: RemoteService, tolerance: float
) -> None:
    model = service.model()
    before = model.passes([DATUM]).logprobs[0]
    model.step(lr=0.0)
    assert close(before, _logprobs(model), tolerance)


def test_gradients_add_up(service: RemoteService, tolerance: float) -> None:
    parts, whole = service.model(), service.model()
    parts.begin([DATUM])
    parts.trained(OTHER)
    whole.begin([DATUM, OTHER])
    whole.step()
    assert close(_logprobs(parts), _logprobs(whole), 10 * tolerance)


def test_requests_are_done_in_the_order_of_their_numbers(
    service: RemoteService, tolerance: float
) -> None:
    ordered, shuffled = service.model().trained(DATUM), service.model()
    step = shuffled.begin_step(seq=2)
    shuffled.begin([DATUM], seq=1)
    service.result(step)
    assert close(_logprobs(ordered), _forward(shuffled, 3), tolerance)


def _forward(model: RemoteModel, seq: int) -> Sequence[float]:
    return model.passes([DATUM], forward=True, seq=seq).logprobs[0]


def test_a_repeated_request_is_applied_once(service: RemoteService, tolerance: float) -> None:
    once, twice = service.model().trained(DATUM), service.model()
    promises = [twice.begin([DATUM], seq=1) for _ in range(2)]
    first, second = (read_answer(service.result(promise)) for promise in promises)
    assert first == second
    steps = [service.result(twice.begin_step(seq=2)) for _ in range(2)]
    assert steps[0] == steps[1]
    assert close(_logprobs(once), _forward(twice, 3), tolerance)


def test_a_result_is_given_again(service: RemoteService) -> None:
    promise = service.model().begin([DATUM])
    assert service.result(promise) == service.result(promise)


def test_models_are_trained_apart(service: RemoteService, tolerance: float) -> None:
    one, other = service.model(), service.model()
    before = _logprobs(other)
    one.begin([DATUM])
    other.begin([OTHER])
    one.step()
    assert close(before, _logprobs(other), tolerance)
    other.step()
    assert not close(_logprobs(one), _logprobs(other), tolerance)


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _gspo(new: Sequence[float], old: Sequence[float]) -> float:
    used = [(n - o, a) for n, o, a in zip(new, old, ADVANTAGES, strict=True) if a]
    ratio = math.exp(sum(difference for difference, _ in used) / len(used))
    return -sum(min(a * ratio, a * _clip(ratio, 1 - 3e-4, 1 + 4e-4)) for _, a in used)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_a_loss_is_its_formula(service: RemoteService, tolerance: float, loss: str) -> None:
    model = service.model()
    old = [value + moved for value, moved in zip(_logprobs(model), _MOVED, strict=True)]
    datum = KitDatum(tokens=TOKENS, inputs={"logprobs": old, "advantages": ADVANTAGES})
    found = model.passes([datum], loss)
    (new,) = found.logprobs
    ratios = [math.exp(n - o) for n, o in zip(new, old, strict=True)]
    rows = list(zip(ADVANTAGES, ratios, new, old, strict=True))
    if loss == "gspo":
        wanted = _gspo(new, old)
    else:
        formulas: Mapping[str, Callable[..., float]] = {
            "importance_sampling": lambda a, r, n, o: -a * r,
            "ppo": lambda a, r, n, o: -min(a * r, a * _clip(r, 0.8, 1.2)),
            "cispo": lambda a, r, n, o: -a * _clip(r, 0.8, 1.2) * n,
            "dro": lambda a, r, n, o: -(a * n - 0.025 * (n - o) ** 2),
        }
        wanted = sum(formulas[loss](*row) for row in rows)
    # A position without advantage may be left out of the quadratic term.
    spare = 0.025 * _MOVED[0] ** 2
    difference = abs(found.metrics["loss:sum"] - wanted)
    assert difference <= 1e-3 * abs(wanted) + 10 * tolerance + spare, (found.metrics, wanted)


def test_clips_are_the_requests(service: RemoteService, tolerance: float) -> None:
    model = service.model()
    old = [value - 1.0 for value in _logprobs(model)]
    datum = KitDatum(tokens=TOKENS, inputs={"logprobs": old, "advantages": (1.0,) * 5})
    settings = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}
    found = model.passes([datum], "ppo", settings=settings)
    assert math.isclose(found.metrics["loss:sum"], -7.5, rel_tol=1e-3, abs_tol=tolerance), found


def test_sparse_inputs_are_what_dense_ones_are(service: RemoteService, tolerance: float) -> None:
    model = service.model()
    sparse = KitDatum(
        tokens=TOKENS, inputs={"weights": WEIGHTS}, sparse=("weights", "target_tokens")
    )
    dense, found = model.passes([DATUM]), model.passes([sparse])
    assert close(dense.logprobs[0], found.logprobs[0], tolerance)
    assert math.isclose(dense.metrics["loss:sum"], found.metrics["loss:sum"], rel_tol=1e-4)


def test_a_loss_that_runs_in_the_client_goes_backward(service: RemoteService) -> None:
    """A custom loss: forward, then cross-entropy whose weights are its gradient, of any sign."""
    model = service.model()
    before = _logprobs(model)
    model.begin([KitDatum(tokens=TOKENS, inputs={"weights": [-g for g in _CUSTOM]})])
    model.step(lr=1e-3)
    after = _logprobs(model)
    assert _sum(_CUSTOM, after) < _sum(_CUSTOM, before), (before, after)


@pytest.mark.parametrize("what", ["loss", "token", "body", "model"])
def test_what_is_wrong_is_the_clients_fault(service: RemoteService, what: str) -> None:
    model = service.model()
    far = KitDatum(tokens=(5, 2**30, 7), inputs={"weights": (1.0, 1.0)})
    with pytest.raises(Failed) as raised:
        if what == "body":
            service.call("POST", "/forward_backward", b"\xff\xff")
        elif what == "model":
            RemoteModel(service, "no-such-model").passes([DATUM])
        else:
            data, loss = ([far], "cross_entropy") if what == "token" else ([DATUM], "no_such_loss")
            model.passes(data, loss)
    assert raised.value.of_the_user and str(raised.value), raised.value


def test_a_model_goes_on_after_a_request_that_was_wrong(service: RemoteService) -> None:
    model = service.model()
    with pytest.raises(Failed):
        model.passes([DATUM], "no_such_loss")
    seq = 2  # whether or not the server counts what it refused at once
    try:
        assert model.passes([DATUM], seq=seq).logprobs
    except Failed as failed:
        pytest.fail(f"request {seq} was answered {failed}")


def test_a_model_that_is_unloaded_is_gone(service: RemoteService) -> None:
    model = service.model()
    service.result(service.post("/unload_model", model_id=model.name))
    with pytest.raises(Failed) as raised:
        model.passes([DATUM])
    assert raised.value.of_the_user, raised.value
