"""`treadle serve`: requests in JSON to the process, and passes in protobuf as it reads them.

A part is a request: the head is `METHOD PATH KEY`, where the key is `own` or `wrong`. SESSION,
MODEL and SAMPLER in the path and the body are names of what the target has made.
"""

import json
import shutil
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, ClassVar, Self

from fuzz.inputs import Input
from fuzz.mutate import Form
from fuzz.target import Fell, Target

from e2e.served import KEY, ServeProcess
from treadle.serve.batches import make_batch
from treadle.serve.errors import ServiceError
from treadle.serve.wire import read_passes
from treadle.tinker.sdk import PATHS

_STATUSES = {200, 204, 400, 401, 403, 404, 410, 413, 429}
# A poll for what comes later takes its time; a first pass of a model is in protobuf.
_LEFT_OUT = ("/retrieve_future", "/forward_backward")


class ServiceTarget(Target):
    """A service with the fake engine and the fake backend."""

    promises = (
        "Every request is answered with a status of the documentation, never 5xx, a failed one "
        "with a sentence; a wrong key never succeeds, and no trace is logged. Then a new session "
        "samples as before."
    )
    form: ClassVar[Form] = "json"
    heads = tuple(
        f"{method} {path.replace('{session}', 'SESSION').replace('{model}', 'MODEL')} {key}"
        for method, path in PATHS
        for key in ("own", "wrong")
        if path not in _LEFT_OUT
    )
    words = tuple(
        word.encode()
        for word in (
            *("session_id", "model_id", "seq_id", "SESSION", "MODEL", "SAMPLER", "base_model"),
            *("adam_params", "learning_rate", "sampling_params", "max_tokens", "stop", "prompt"),
            *("\\ud800", "\\u0000", "1e400", "NaN", "-1", "18446744073709551616", "lora_config"),
        )
    )

    def __enter__(self) -> Self:
        self._directory = Path(tempfile.mkdtemp())
        settings = ("policy.backend=fake", "rollout.name=fake", "--max-models", "100000")
        self._service = ServeProcess(self._directory / "state", *settings)
        self._log = self._directory / "state" / "logs" / "serve.log"
        self._made = 0
        self._sampled = self._sample()
        return self

    def __exit__(self, *_: object) -> None:
        self._service.process.kill()
        self._service.process.wait()
        assert self._service.process.stdout is not None
        self._service.process.stdout.close()
        shutil.rmtree(self._directory)

    def check(self, parts: Input) -> None:
        began = self._log.stat().st_size
        names = self._names()
        for part in parts:
            head, body = part.head, part.body
            for name, value in names.items():
                head, body = head.replace(name, value), body.replace(name.encode(), value.encode())
            self._give(head, body)
        if (found := self._sample()) != self._sampled:
            raise Fell(f"a session sampled {self._sampled!r} before, and now {found!r}")
        with self._log.open("rb") as log:
            log.seek(began)
            if b"Traceback" in (text := log.read()):
                raise Fell(f"a trace was logged: {text[-3000:].decode(errors='replace')}")

    def _names(self) -> dict[str, str]:
        session = str(self._ask("POST /create_session", {})["session_id"])
        asked = {"session_id": session, "model_seq_id": 0, "base_model": "demo:calculator"}
        model = str(self._ask("POST /create_model", asked)["model_id"])
        asked = {"session_id": session, "sampling_session_seq_id": 0}
        sampler = self._ask("POST /create_sampling_session", asked)["sampling_session_id"]
        return {"SESSION": session, "MODEL": model, "SAMPLER": str(sampler)}

    def _sample(self) -> bytes:
        """Samples from the base model, in a new session."""
        session = self._ask("POST /create_session", {})["session_id"]
        asked = {"session_id": session, "sampling_session_seq_id": 0}
        sampler = self._ask("POST /create_sampling_session", asked)["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
        params = {"max_tokens": 3, "seed": 1}
        asked = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt}
        promise = self._ask("POST /asample", {**asked, "sampling_params": params})
        asked = {"request_id": promise["request_id"]}
        status, found = self._send("POST /retrieve_future own", json.dumps(asked).encode())
        if status != 200 or b'"error"' in found:
            raise Fell(f"a new session does not sample: {status} {found[:500]!r}")
        return found

    def _ask(self, head: str, given: dict[str, Any]) -> Any:
        status, found = self._send(f"{head} own", json.dumps(given).encode())
        if status != 200:
            raise Fell(f"{head} of the target itself is answered {status} {found[:500]!r}")
        return json.loads(found)

    def _give(self, head: str, body: bytes) -> None:
        status, found = self._send(head, body)
        if status not in _STATUSES:
            raise Fell(f"{head}: {status} {found[:500]!r}")
        if head.endswith(" wrong") and status < 400 and "/healthz" not in head:
            raise Fell(f"{head} succeeded with a wrong key")
        if status >= 400:
            try:
                told = json.loads(found)["detail"]
            except (ValueError, KeyError, TypeError):
                told = ""
            if not told or len(found) > 4000:
                raise Fell(f"{head}: no sentence in {len(found)} bytes: {found[:200]!r}")

    def _send(self, head: str, body: bytes) -> tuple[int, bytes]:
        method, path, key = head.split(" ")
        url = f"{self._service.base_url}/api/v1{urllib.parse.quote(path, safe='/:?=&')}"
        request = urllib.request.Request(url, body or None, method=method)
        request.add_header("Content-Type", "application/json")
        request.add_header("X-API-Key", KEY if key == "own" else "wrong")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()


class PassesTarget(Target):
    """What reads passes, and makes batches of them."""

    promises = "Bytes are a batch that the policy can take, or refused by a sentence."
    form: ClassVar[Form] = "protobuf"

    def check(self, parts: Input) -> None:
        for part in parts:
            try:
                batch = make_batch(read_passes(part.body), vocab_size=16, context_length=32)
            except ServiceError as error:
                if not str(error) or len(str(error)) > 2000:
                    raise Fell(f"no sentence: {str(error)[:200]!r}") from error
                continue
            for sequence, factors in zip(batch.sequences, batch.factors, strict=True):
                if len(factors) != len(sequence.ids) - 1 or max(sequence.ids) >= 16:
                    raise Fell(f"a batch has {len(factors)} factors of {list(sequence.ids)}")
