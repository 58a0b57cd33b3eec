"""The conformance kit for Tinker's API: against `treadle serve`, and with faults in between."""

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from e2e.served import KEY, ServeProcess
from treadle.tinker.sdk import MESSAGES

# What each alteration in `Faulty` must be found by.
FAULTS = {
    "a wrong key is refused",
    "an unknown session is refused",
    "forward leaves no gradient",
    "a step without learning rate changes nothing",
    "a loss is its formula [dro]",
    "clips are the requests",
    "each sequence has a name",
    "a repeated request has the samples of the first",
    "samples are of the weights that are named",
    "a state is loaded with its optimizer and without",
    "checkpoints are listed and deleted",
    "it is answered or refused by a sentence [POST copy weights]",
}
OTHERS = "health or session lives or token has a logprob or stop token or gradients add"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    running = ServeProcess(tmp_path_factory.mktemp("serve") / "state", "policy.backend=fsdp")
    yield running
    running.process.terminate()
    assert running.process.wait() == 0


def failing(address: str, folder: Path, *options: str) -> tuple[int, int, set[str]]:
    """Runs the kit; returns its exit code, how many checks hold, and those that do not."""
    key, output = folder / "key", folder / "found.json"
    key.write_text(KEY)
    command = [sys.executable, "-m", "treadle.conformance", "--tinker", address]
    command += ["--token-file", str(key), "--json", str(output), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(output.read_text()) if output.exists() else pytest.fail(done.stderr)
    assert all(check["seen"] for check in found["checks"] if check["outcome"] != "holds")
    names = {check["check"] for check in found["checks"] if check["outcome"] == "does not"}
    return done.returncode, found["holds"], names


def test_the_service_holds_everything(service: ServeProcess, tmp_path: Path) -> None:
    code, holds, names = failing(service.base_url, tmp_path)
    assert (code, names) == (0, set())
    assert holds > 90


def test_each_fault_is_named_and_nothing_else(service: ServeProcess, tmp_path: Path) -> None:
    Faulty.behind, Faulty.asked = service.base_url, set()
    Faulty.deleting = set()
    with ThreadingHTTPServer(("127.0.0.1", 0), Faulty) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        only = " or ".join(name.partition("[")[0].strip() for name in FAULTS)
        address = f"http://127.0.0.1:{server.server_port}"
        code, holds, names = failing(address, tmp_path, "--only", f"{only} or {OTHERS}")
        server.shutdown()
    assert (code, names) == (1, FAULTS)
    assert holds > 50
    assert Faulty.deleting == {"tml-of-nobody"}


def test_no_service_is_said_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "treadle.conformance", "--tinker", "http://127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "http://127.0.0.1:1 does not answer get_server_capabilities" in done.stderr


class Faulty(BaseHTTPRequestHandler):
    """Gives requests to the service, some of them altered, and alters some answers."""

    behind: str
    asked: set[bytes]
    deleting: set[str]
    """Keys that were sent to delete themselves."""
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.removeprefix("/api/v1")
        if path == "/forward_backward":
            body = self._pass(body)
        elif path == "/asample" and body in self.asked:
            body = body.replace(b'"seq_id": 0', b'"seq_id": 77')
        elif body:
            body = json.dumps(self._object(path, json.loads(body))).encode()
        self.asked.add(body)
        if path == "/copy_weights":
            self._answer(404, b'{"detail": "Not Found"}', "application/json")
        elif self.command == "DELETE":
            if path == "/auth/apikey/me":
                self.deleting.add(self.headers["X-API-Key"])
            self._answer(200, b"{}", "application/json")
        else:
            self._forward(body or None)

    do_GET = do_PUT = do_DELETE = do_POST

    def _pass(self, body: bytes) -> bytes:
        message: Any = MESSAGES["ForwardBackwardRequest"].FromString(body)
        if message.forward_only and message.data[0].model_input[0].encoded_text.tokens[0] == 11:
            message.forward_only = False
        if message.loss_fn == "dro":
            message.loss_fn = "importance_sampling"
        del message.loss_fn_config[:]
        encoded: bytes = message.SerializeToString()
        return encoded

    def _object(self, path: str, given: dict[str, Any]) -> dict[str, Any]:
        if path == "/create_session":
            return given
        if path == "/create_sampling_session" and "tinker://no/" not in str(given):
            given.pop("model_path", None)
        if path == "/load_weights":
            given["optimizer"] = True
        if given.get("adam_params", {}).get("learning_rate") == 0.0:
            given["adam_params"]["learning_rate"] = 0.01
        return given

    def _forward(self, body: bytes | None) -> None:
        request = urllib.request.Request(self.behind + self.path, body, method=self.command)
        request.add_header("Content-Type", self.headers["Content-Type"])
        request.add_header("X-API-Key", KEY)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, found, kind = 200, answer.read(), answer.headers["content-type"]
        except urllib.error.HTTPError as error:
            status, found, kind = error.code, error.read(), "application/json"
            if self.path.endswith("heartbeat") and body != b"{}":
                status = 500
        if self.path.endswith("asample") and status == 200:
            found = json.dumps(json.loads(found) | {"sample_sequence_ids": []}).encode()
        self._answer(status, found, kind or "application/json")

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return None
