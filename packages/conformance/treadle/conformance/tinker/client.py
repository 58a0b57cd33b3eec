"""A client of Tinker's API: the SDK's requests over HTTP, one at a time, and what comes back.

It waits for each answer and repeats nothing, so that a check sees what the server did.
"""

from __future__ import annotations

import itertools
import json
import math
import ssl
import time
import urllib.error
import urllib.request
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from treadle.tinker.sdk import MESSAGES

__all__ = [
    "Failed",
    "KitDatum",
    "KitSample",
    "PassAnswer",
    "RemoteModel",
    "RemoteService",
    "read_answer",
]

_PROTOBUF: Final = "application/x-protobuf"
_CALL_S: Final = 60.0
_RESULT_S: Final = 300.0
_FLOAT32, _INT64 = 1, 2
Values = Sequence[float]


class Failed(Exception):
    """A request failed.

    Attributes:
        status: Status of HTTP; for a future that failed, 400 if the user did it, else 500.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def of_the_user(self) -> bool:
        """Whether the server found the request wrong, and is well itself."""
        return 400 <= self.status < 500


class PassAnswer(NamedTuple):
    """What a pass is answered: log-probabilities [N] of each datum, and metrics."""

    logprobs: Sequence[Values]
    metrics: Mapping[str, float]


class KitSample(NamedTuple):
    """What is sampled: (ids, log-probabilities, whether a stop ended it), and of the prompt."""

    sequences: Sequence[tuple[Sequence[int], Values, bool]]
    prompt_logprobs: Values


class KitDatum(NamedTuple):
    """One sequence, and [N] inputs of the loss of each target, the id that follows.

    `sparse` has the names of the inputs that are sent as sparse rows.
    """

    tokens: Sequence[int]
    inputs: Mapping[str, Values]
    sparse: Sequence[str] = ()

    def write(self, message: Any) -> None:
        """Writes it into a message of the SDK."""
        ids = array("i", self.tokens[:-1]).tobytes()
        message.model_input.add().encoded_text.tokens = ids
        for name, values in {"target_tokens": self.tokens[1:], **self.inputs}.items():
            kind = "q" if name == "target_tokens" else "f"
            tensor = message.loss_fn_inputs.add(key=name).value
            tensor.dtype = _INT64 if kind == "q" else _FLOAT32
            if name not in self.sparse:
                tensor.dense = array(kind, values).tobytes()
                tensor.shape.append(len(values))
                continue
            ends = itertools.accumulate((bool(value) for value in values), initial=0)
            csr = tensor.sparse_csr
            csr.values = array(kind, [value for value in values if value]).tobytes()
            csr.crow_indices = array("q", ends).tobytes()
            csr.col_indices = array("q", [0] * sum(map(bool, values))).tobytes()
            tensor.shape.extend((len(values), 1))


class RemoteService:
    """A server at an address, a URL without /api/v1."""

    def __init__(self, address: str, key: str, tls: ssl.SSLContext | None = None) -> None:
        self.address = address.rstrip("/")
        self.key = key
        self._tls = tls

    def call(self, method: str, path: str, body: Any = None, key: str | None = None) -> Any:
        """Returns the answer: a value of JSON, or bytes; sends bytes as protobuf, else JSON.

        Raises:
            Failed: It is answered with an error.
        """
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.address}/api/v1{path}", data=data, method=method)
        kind = _PROTOBUF if isinstance(body, bytes) else "application/json"
        request.add_header("Content-Type", kind)
        request.add_header("Accept", f"application/json, {_PROTOBUF}")
        request.add_header("X-API-Key", self.key if key is None else key)
        try:
            with urllib.request.urlopen(request, timeout=_CALL_S, context=self._tls) as response:
                found, kind = response.read(), response.headers["content-type"] or ""
        except urllib.error.HTTPError as error:
            raise Failed(error.read().decode(errors="replace")[:500], error.code) from None
        except OSError as error:
            raise Failed(f"no answer to {method} {path}: {error}", 599) from None
        return found if _PROTOBUF in kind else json.loads(found or b"{}")

    def post(self, path: str, /, **body: Any) -> Any:
        """As `call`, with an object of JSON."""
        return self.call("POST", path, body)

    def result(self, promise: Mapping[str, Any]) -> Any:
        """Returns what a promise becomes.

        Raises:
            Failed: It failed, or is not there after five minutes.
        """
        ended = time.monotonic() + _RESULT_S
        while time.monotonic() < ended:
            found = self.post("/retrieve_future", request_id=promise["request_id"])
            if isinstance(found, bytes):
                return found
            if "error" in found:
                own = str(found.get("category")).lower() == "user"
                raise Failed(str(found["error"]), 400 if own else 500)
            if found.get("type") != "try_again":
                return found
        raise Failed(f"{promise} has no result after {_RESULT_S:.0f} s", 500)

    def base_model(self) -> Mapping[str, Any]:
        """Returns the first model that it supports."""
        found: Mapping[str, Any] = self.call("GET", "/get_server_capabilities")
        return dict(found["supported_models"][0])

    def session(self) -> str:
        """Returns a new session."""
        given = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
        return str(self.post("/create_session", **given)["session_id"])

    def model(self) -> RemoteModel:
        """Returns a new model, in a session of its own; all have the same adapters of rank 4."""
        promise = self.post(
            "/create_model",
            session_id=self.session(),
            model_seq_id=0,
            base_model=self.base_model()["model_name"],
            lora_config={"rank": 4, "seed": 0},
        )
        return RemoteModel(self, str(self.result(promise)["model_id"]))

    def sampler(self, model_path: str | None = None) -> str:
        """Returns a sampling session, of a checkpoint or of the base model."""
        of = {"model_path": model_path}
        if model_path is None:
            of = {"base_model": self.base_model()["model_name"]}
        given = {"session_id": self.session(), "sampling_session_seq_id": 0, **of}
        return str(self.post("/create_sampling_session", **given)["sampling_session_id"])

    def ask(
        self, sampler: str, seq: int, prompt: Sequence[int], count: int = 1, **params: Any
    ) -> Any:
        """Returns the promise of a request to sample."""
        scored = {"prompt_logprobs": True} if params.pop("prompt_logprobs", False) else {}
        return self.post(
            "/asample",
            sampling_session_id=sampler,
            seq_id=seq,
            num_samples=count,
            prompt={"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
            sampling_params={"max_tokens": 8, "temperature": 1.0, **params},
            **scored,
        )

    def sample(self, *arguments: Any, **params: Any) -> KitSample:
        """Asks, and returns the samples; see `ask`."""
        found = self.result(self.ask(*arguments, **params))
        message = _read("SampleResponse", found)
        return KitSample(
            [
                (_numbers("i", each.tokens), _numbers("f", each.logprobs), each.stop_reason == 0)
                for each in message.sequences
            ],
            _numbers("f", message.prompt_logprobs),
        )

    def scores(self, sampler: str, seq: int, tokens: Sequence[int]) -> Values:
        """Returns the log-probability of each id but the first."""
        found = self.sample(sampler, seq, tokens, prompt_logprobs=True, max_tokens=1)
        assert len(found.prompt_logprobs) == len(tokens), found
        assert math.isnan(found.prompt_logprobs[0]), "the first token has no log-probability"
        return found.prompt_logprobs[1:]


class RemoteModel:
    """A model that is trained; its requests are numbered as they are made."""

    def __init__(self, service: RemoteService, name: str) -> None:
        self.service = service
        self.name = name
        self._numbers = itertools.count(1)

    def body(
        self,
        data: Sequence[KitDatum],
        loss: str = "cross_entropy",
        *,
        seq: int | None = None,
        forward: bool = False,
        settings: Mapping[str, float] | None = None,
    ) -> bytes:
        """Returns the body of a pass."""
        message: Any = MESSAGES["ForwardBackwardRequest"](
            model_id=self.name,
            seq_id=next(self._numbers) if seq is None else seq,
            loss_fn=loss,
            forward_only=forward,
        )
        for each in data:
            each.write(message.data.add())
        for key, value in (settings or {}).items():
            message.loss_fn_config.add(key=key, value=value)
        encoded: bytes = message.SerializeToString()
        return encoded

    def begin(self, *arguments: Any, **more: Any) -> Any:
        """Returns the promise of a pass; see `body`."""
        return self.service.call("POST", "/forward_backward", self.body(*arguments, **more))

    def passes(self, *arguments: Any, **more: Any) -> PassAnswer:
        """Makes a pass; see `body`."""
        return read_answer(self.service.result(self.begin(*arguments, **more)))

    def begin_step(self, *, seq: int | None = None, lr: float = 1e-2) -> Any:
        """Returns the promise of a step of the optimizer."""
        number = next(self._numbers) if seq is None else seq
        adam = {"learning_rate": lr, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
        body = {"model_id": self.name, "seq_id": number, "adam_params": adam}
        return self.service.post("/optim_step", **body)

    def step(self, lr: float = 1e-2) -> None:
        """Makes a step of the optimizer."""
        self.service.result(self.begin_step(lr=lr))

    def request(self, path: str, /, **body: Any) -> Any:
        """Makes another request to the model, and returns its result."""
        given = {"model_id": self.name, "seq_id": next(self._numbers), **body}
        return self.service.result(self.service.post(path, **given))

    def trained(self, datum: KitDatum) -> RemoteModel:
        """Makes a pass and a step; returns the model."""
        self.begin([datum])
        self.step()
        return self


def read_answer(found: Any) -> PassAnswer:
    """Returns the answer of a `ForwardBackwardOutput`."""
    message = _read("ForwardBackwardOutput", found)
    tensors = [
        field.value
        for record in message.loss_fn_outputs
        for field in record.fields
        if field.key == "logprobs"
    ]
    return PassAnswer(
        [
            _numbers("f", tensor.data[start:end])
            for tensor in tensors
            for start, end in itertools.pairwise(_numbers("q", tensor.offsets))
        ],
        {metric.key: metric.value for metric in message.metrics},
    )


def _read(message: str, found: Any) -> Any:
    if not isinstance(found, bytes):
        raise Failed(f"the answer is JSON, which the SDK refuses: {found}", 599)
    return MESSAGES[message].FromString(found)


def _numbers(kind: str, data: bytes) -> list[Any]:
    return array(kind, data).tolist()
