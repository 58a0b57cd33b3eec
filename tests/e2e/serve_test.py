"""`treadle serve` as a process: requests in order and once, weights in turn, a kill and a start.

The client is a few lines over HTTP; `tests/installs/tinker_test.py` asks the same service with the
official one.
"""

import json
import math
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from e2e.served import KEY, ServeProcess
from treadle.tinker.sdk import MESSAGES
from treadle.tracing.trajectories.filter import Filter
from treadle.tracing.viewer.runs import open_runs
from treadle.trainer.report import read_metrics

TOKENS = (5, 6, 7, 8, 9, 10)
ADAM = {"learning_rate": 1e-2}


class Service(ServeProcess):
    """The process, and its client."""

    tls: ssl.SSLContext | None = None

    def __init__(self, directory: Path, *options: str) -> None:
        super().__init__(directory, "policy.backend=fake", "rollout.name=fake", *options)

    def call(self, path: str, body: Mapping[str, Any] | bytes | None, key: str = KEY) -> Any:
        """Returns the answer in JSON, or its bytes."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        kind = "application/x-protobuf" if isinstance(body, bytes) else "application/json"
        request = urllib.request.Request(f"{self.base_url}/api/v1{path}", data=data)
        request.add_header("X-API-Key", key)
        request.add_header("Content-Type", kind)
        with urllib.request.urlopen(request, timeout=60, context=self.tls) as response:
            found = response.read()
            return json.loads(found) if "json" in response.headers["content-type"] else found

    def refusal(self, path: str, body: Mapping[str, Any] | bytes, **more: str) -> tuple[int, str]:
        with pytest.raises(urllib.error.HTTPError) as raised:
            self.call(path, body, **more)
        return raised.value.code, json.loads(raised.value.read())["detail"]

    def result(self, promise: Mapping[str, Any]) -> Any:
        while True:
            found = self.call("/retrieve_future", {"request_id": promise["request_id"]})
            if not isinstance(found, dict) or found.get("type") != "try_again":
                return found

    def new_model(self) -> str:
        given = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
        session = self.call("/create_session", given)["session_id"]
        wanted = {"session_id": session, "model_seq_id": 0, "base_model": "demo:calculator"}
        return str(self.result(self.call("/create_model", wanted))["model_id"])

    def step(self, model: str, seq: int) -> Any:
        return self.call("/optim_step", {"model_id": model, "seq_id": seq, "adam_params": ADAM})

    def logprobs(self, model: str, seq: int) -> Sequence[float]:
        return read(self.result(self.call("/forward_backward", passes(model, seq, forward=True))))

    def sampled(self, sampler: str, seq: int) -> Any:
        given = {
            "sampling_session_id": sampler,
            "seq_id": seq,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(TOKENS)}]},
            "num_samples": 2,
            "sampling_params": {"max_tokens": 4, "seed": 3},
            "prompt_logprobs": True,
        }
        promise = self.call("/asample", given)
        assert len(promise["sample_sequence_ids"]) == 2
        return MESSAGES["SampleResponse"].FromString(self.result(promise))


def passes(model: str, seq: int, *, forward: bool = False, weight: float = 1.0) -> bytes:
    message: Any = MESSAGES["ForwardBackwardRequest"](
        model_id=model, seq_id=seq, loss_fn="cross_entropy", forward_only=forward
    )
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray(TOKENS[:-1], "<i4").tobytes()
    targets, weights = np.asarray(TOKENS[1:], "<i8"), np.full(5, weight, "<f4")
    for name, values, kind in (("target_tokens", targets, 2), ("weights", weights, 1)):
        tensor = datum.loss_fn_inputs.add(key=name).value
        tensor.dense, tensor.dtype = values.tobytes(), kind
        tensor.shape.append(5)
    encoded: bytes = message.SerializeToString()
    return encoded


def read(body: bytes) -> Sequence[float]:
    (record,) = MESSAGES["ForwardBackwardOutput"].FromString(body).loss_fn_outputs
    fields = {field.key: field.value.data for field in record.fields}
    logprobs: list[float] = np.frombuffer(fields["logprobs"], "<f4").tolist()
    return logprobs


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve") / "state"


@pytest.fixture(scope="module")
def service(directory: Path) -> Iterator[Service]:
    running = Service(directory)
    yield running
    running.process.terminate()
    assert running.process.wait() == 0


def test_requests_are_done_in_order_and_once(service: Service) -> None:
    ordered, shuffled = service.new_model(), service.new_model()
    for seq in (1, 2):
        service.call("/forward_backward", passes(ordered, seq, weight=float(seq)))
    service.result(service.step(ordered, 3))
    # The first comes last, and one comes three times.
    promise = service.step(shuffled, 3)
    for seq in (2, 2, 1, 2):
        service.call("/forward_backward", passes(shuffled, seq, weight=float(seq)))
    assert service.result(promise)["metrics"]["optim/step"] == 1.0
    assert service.result(service.step(shuffled, 3)) == service.result(promise)
    assert service.logprobs(shuffled, 4) == service.logprobs(ordered, 4)


def test_each_sampling_session_has_its_own_weights(service: Service) -> None:
    model = service.new_model()
    session = model.partition(":")[0]
    wanted = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "demo:calculator"}
    base = service.call("/create_sampling_session", wanted)["sampling_session_id"]
    untrained = service.sampled(base, 0)
    assert [len(each.tokens) for each in untrained.sequences] == [16, 16]
    assert len(untrained.prompt_logprobs) == 4 * len(TOKENS)
    service.call("/forward_backward", passes(model, 1))
    service.step(model, 2)
    save = {"model_id": model, "seq_id": 3, "sampling_session_seq_id": 1}
    answer = service.result(service.call("/save_weights_for_sampler", save))
    trained = answer["sampling_session_id"]
    first = service.sampled(trained, 0)
    other = service.sampled(base, 1)
    assert first.sequences != other.sequences
    assert service.sampled(trained, 1) == first  # the servers had other weights meanwhile


def test_a_killed_service_goes_on_where_it_was(directory: Path, service: Service) -> None:
    """A gradient that was answered, and one that was only accepted, are in the next step."""
    place = directory.parent / "killed"
    killed, whole = Service(place), service.new_model()
    model = killed.new_model()
    promise: Mapping[str, Any] = {}
    for each, name in ((service, whole), (killed, model)):
        each.call("/forward_backward", passes(name, 1))
        each.result(each.step(name, 2))
        each.result(each.call("/forward_backward", passes(name, 3, weight=2.0)))
        promise = each.call("/forward_backward", passes(name, 4, weight=3.0))
    killed.process.kill()
    killed.process.wait()
    again = Service(place)
    assert len(read(again.result(promise))) == 5
    assert again.result(again.step(model, 2))["metrics"]["optim/step"] == 1.0  # told again
    done = again.result(again.step(model, 5))
    assert done == service.result(service.step(whole, 5))
    assert again.logprobs(model, 6) == service.logprobs(whole, 6)
    again.process.terminate()
    assert again.process.wait() == 0


def test_what_cannot_be_done_is_refused_with_its_name(service: Service) -> None:
    model = service.new_model()
    assert service.refusal("/get_info", {"model_id": model}, key="tml-other")[0] == 401
    code, text = service.refusal("/create_custom_loss", {})
    assert code == 400 and "losses that clients upload" in text
    assert service.refusal("/optim_step", {"model_id": "none", "seq_id": 1})[0] == 404
    code, text = service.refusal("/forward_backward", b"\xff")
    assert code == 400 and "no ForwardBackwardRequest" in text
    assert service.refusal("/forward_backward", {"model_id": model})[0] == 400
    failed = service.result(service.step(model, 1))
    assert failed["category"] == "user" and "send forward_backward first" in failed["error"]
    assert service.result(service.call("/unload_model", {"model_id": model}))["model_id"] == model
    assert service.refusal("/forward_backward", passes(model, 2))[0] == 404


def test_a_model_is_recorded_as_a_run_is(directory: Path, service: Service) -> None:
    model = service.new_model()
    save = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 1}
    answer = service.result(service.call("/save_weights_for_sampler", save))
    service.sampled(answer["sampling_session_id"], 0)
    for seq in (2, 4):
        service.call("/forward_backward", passes(model, seq))
        service.result(service.step(model, seq + 1))
    service.logprobs(model, 6)  # after what a step leaves to be written
    run = directory / "runs" / model.replace(":", "-")
    first, second = read_metrics(run / "metrics.jsonl")
    assert (first["step"], second["step"], first["tokens/sampled"]) == (1.0, 2.0, 8.0)
    assert math.isclose(first["train/loss"], first["actor/loss"] / 5)
    (shown,) = open_runs([run])
    assert shown.describe()["state"] == "running"
    assert shown.trajectories.count(Filter.parse("step=1")) == 2
    service.call("/unload_model", {"model_id": model})
    assert shown.describe()["state"] == "finished"


def test_what_the_service_did_is_counted(service: Service) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{service.base_url}/metrics")
    request = urllib.request.Request(f"{service.base_url}/metrics")
    request.add_header("Authorization", f"Bearer {KEY}")
    with urllib.request.urlopen(request) as response:
        text = response.read().decode()
    assert 'treadle_serve_requests_total{kind="optim_step",outcome="done"}' in text
    assert 'treadle_serve_requests_in_flight{kind="sample"} 0.0' in text


def test_a_session_has_its_share_and_no_more_over_tls(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = (
        f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {certificate} -days 1 "
        "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run(words.split(), check=True, capture_output=True)
    limits = ("--max-session-models", "1", "--max-session-requests", "2")
    tls = ("--tls-certificate", str(certificate), "--tls-key", str(key))
    service = Service(tmp_path / "state", *limits, *tls)
    service.tls = ssl.create_default_context(cafile=certificate)
    model = service.new_model()
    session = model.partition(":")[0]
    wanted = {"session_id": session, "model_seq_id": 1, "base_model": "demo:calculator"}
    code, text = service.refusal("/create_model", wanted)
    assert code == 403 and "--max-session-models" in text
    assert service.new_model() != model  # of another session
    for seq in (4, 3, 2):  # they wait for the first
        service.step(model, seq)
    service.call("/forward_backward", passes(model, 1))
    assert service.result(service.step(model, 2))["metrics"]["optim/step"] == 1.0
    assert service.result(service.step(model, 4))["category"] == "user"
    service.process.terminate()
    assert service.process.wait() == 0
