"""Checkpoints: what they bring back, how they are listed and removed."""

from collections.abc import Sequence

import pytest

from treadle.conformance.tinker.checks.training_checks import DATUM, close
from treadle.conformance.tinker.client import Failed, RemoteModel, RemoteService


def _after_a_step(model: RemoteModel) -> Sequence[float]:
    (found,) = model.trained(DATUM).passes([DATUM], forward=True).logprobs
    return found


def _loaded(service: RemoteService, path: str, *, optimizer: bool) -> RemoteModel:
    """A model that is created as the SDK does it, from what is told of the checkpoint."""
    about = service.post("/weights_info", tinker_path=path)
    assert about["lora_rank"] == 4, about
    model = service.model()
    model.request("/load_weights", path=path, optimizer=optimizer)
    return model


def test_a_state_is_loaded_with_its_optimizer_and_without(
    service: RemoteService, tolerance: float
) -> None:
    model = service.model().trained(DATUM)
    path = model.request("/save_weights", path="kit")["path"]
    (saved,) = model.passes([DATUM], forward=True).logprobs
    whole, bare = (_loaded(service, path, optimizer=each) for each in (True, False))
    for loaded in (whole, bare):
        (found,) = loaded.passes([DATUM], forward=True).logprobs
        assert close(found, saved, tolerance), (found, saved)
    wanted = _after_a_step(model)
    assert close(_after_a_step(whole), wanted, tolerance)
    assert not close(_after_a_step(bare), wanted, tolerance), "the optimizer came along"


def test_checkpoints_are_listed_and_deleted(service: RemoteService) -> None:
    model = service.model().trained(DATUM)
    paths = {
        model.request("/save_weights", path="kit")["path"],
        model.request("/save_weights_for_sampler", path="kit")["path"],
    }
    below = f"/training_runs/{model.name}"
    assert service.call("GET", below, None)["training_run_id"] == model.name
    runs = service.call("GET", "/training_runs?limit=100&offset=0", None)["training_runs"]
    assert model.name in {each["training_run_id"] for each in runs}
    for path in (f"{below}/checkpoints", "/checkpoints?limit=100&offset=0"):
        found = service.call("GET", path, None)["checkpoints"]
        assert paths <= {each["tinker_path"] for each in found}, path
    service.call("DELETE", f"{below}/checkpoints/sampler_weights/kit", None)
    found = service.call("GET", f"{below}/checkpoints", None)["checkpoints"]
    assert {each["tinker_path"] for each in found} == {
        path for path in paths if "/weights/" in path
    }


def test_a_path_that_names_nothing_is_the_clients_fault(service: RemoteService) -> None:
    with pytest.raises(Failed) as raised:
        service.model().request("/load_weights", path="tinker://no/weights/such", optimizer=True)
    assert raised.value.of_the_user and str(raised.value), raised.value
