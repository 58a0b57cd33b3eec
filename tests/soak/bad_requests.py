"""Bad requests at the run's servers, at the proxy endpoint and at the sandbox server.

Each is a function that sends one and returns what came back in a word: a gRPC status or an HTTP
status. A table says which answers are right. After each round of them, a good request must be
answered as ever.
"""

import http.client
import json
import random
import socket
import struct
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
from soak.log import Log

from treadle.rollout.v1 import generation_service_pb2 as generation
from treadle.rollout.v1 import weight_sync_service_pb2 as sync

_PACKAGE = "/treadle.rollout.v1."
_METHODS = (
    "GenerationService/Generate",
    "ServerService/GetServerInfo",
    "ServerService/Pause",
    "ServerService/ReleaseMemory",
    "WeightSyncService/BeginUpdate",
    "WeightSyncService/CommitUpdate",
    "WeightSyncService/AbortUpdate",
)
_DEADLINE_S = 20.0
# A server that is being killed, or is stopped, gives these answers to good requests too.
_GONE = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"})
_UNANSWERED = (AssertionError, LookupError, OSError, ValueError, http.client.HTTPException)
"""What is raised where an answer is missing or is not what it should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Who gets bad requests.

    Attributes:
        address: host:port.
        secret: The token of a rollout server, the key of the proxy; none for the sandbox.
    """

    address: str
    secret: str = ""


BadRequest = Callable[[Target, random.Random], str]


# --- rollout servers -----------------------------------------------------------------------------


def _call(target: Target, method: str, message: bytes, token: str | None) -> str:
    """Makes one call; returns its status."""
    with grpc.insecure_channel(target.address) as channel:
        metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        call: Callable[..., Any] = channel.unary_stream(_PACKAGE + method)
        try:
            for _ in call(message, timeout=_DEADLINE_S, metadata=metadata):
                pass
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def _junk(rng: random.Random, least: int, most: int) -> bytes:
    return rng.randbytes(rng.randint(least, most))


def _generate(prompt: Sequence[int] = (1, 2, 3), **sampling: object) -> bytes:
    return generation.GenerateRequest(
        request_id="soak",
        prompt_token_ids=prompt,
        sampling=generation.SamplingParams(**{"max_tokens": 4, **sampling}),  # type: ignore[arg-type]
    ).SerializeToString()


def _server_no_token(target: Target, rng: random.Random) -> str:
    return _call(target, rng.choice(_METHODS), _junk(rng, 0, 200), None)


def _server_wrong_token(target: Target, rng: random.Random) -> str:
    return _call(target, rng.choice(_METHODS), _junk(rng, 0, 1 << 21), rng.randbytes(9).hex())


def _server_malformed(target: Target, rng: random.Random) -> str:
    # A field of 127 bytes that are not there.
    message = b"\x0a\x7f" + _junk(rng, 1, 60)
    return _call(target, rng.choice(_METHODS), message, target.secret)


def _server_many_stop_ids(target: Target, rng: random.Random) -> str:
    many = [rng.randrange(100)] * rng.randint(200_000, 500_000)
    return _call(target, _METHODS[0], _generate(stop_token_ids=many), target.secret)


def _server_long_prompt(target: Target, rng: random.Random) -> str:
    return _call(target, _METHODS[0], _generate([1] * rng.randint(5_000, 500_000)), target.secret)


def _server_bad_sampling(target: Target, rng: random.Random) -> str:
    wrong = rng.choice(
        (
            {"temperature": float("nan")},
            {"top_p": float("inf")},
            {"max_tokens": 0},
            {"stop_token_ids": [2**32 - 1]},
        )
    )
    return _call(target, _METHODS[0], _generate(**wrong), target.secret)


def _server_unknown_update(target: Target, rng: random.Random) -> str:
    message = sync.AbortUpdateRequest(update_id=rng.randbytes(4).hex()).SerializeToString()
    return _call(target, "WeightSyncService/AbortUpdate", message, target.secret)


def _server_wrong_update(target: Target, rng: random.Random) -> str:
    request = sync.BeginUpdateRequest(update_id="soak", weight_version=rng.randrange(2**63))
    request.tensors.add(name="no/such/tensor", shape=[2**40, 2**40])
    return _call(target, _METHODS[4], request.SerializeToString(), target.secret)


def _server_hang_up(target: Target, rng: random.Random) -> str:
    """Leaves a completion after its first message, or before."""
    with grpc.insecure_channel(target.address) as channel:
        call: Callable[..., Any] = channel.unary_stream(_PACKAGE + _METHODS[0])
        message = _generate([rng.randrange(3, 500) for _ in range(40)], max_tokens=64)
        metadata = (("authorization", f"Bearer {target.secret}"),)
        answer = call(message, timeout=_DEADLINE_S, metadata=metadata)
        with suppress(grpc.RpcError):
            if rng.random() < 0.5:
                next(iter(answer), None)
        answer.cancel()
    return "left"


def _half_open(target: Target, rng: random.Random) -> str:
    """Connects, says nothing or the beginning of something, and leaves."""
    host, port = target.address.rsplit(":", 1)
    beginnings = (
        b"",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        _junk(rng, 1, 500),
        b"POST /run_code HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n{",
    )
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(rng.choice(beginnings))
        if rng.random() < 0.5:  # with a reset
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    return "left"


# --- HTTP servers --------------------------------------------------------------------------------


def post(target: Target, path: str, body: bytes, key: str | None = None) -> tuple[str, bytes]:
    """Posts a body; returns the status and the answer."""
    connection = http.client.HTTPConnection(target.address, timeout=60)
    try:
        headers = {"content-type": "application/json"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return str(answer.status), answer.read()
    finally:
        connection.close()


def _open_session(target: Target) -> tuple[str, str, str]:
    """Opens a session at the proxy; returns its path, its id and its key."""
    status, body = post(target, "/sessions", b'{"task_id": "t", "seed": 1}', target.secret)
    assert status == "201", body
    opened = json.loads(body)
    return opened["base_url"].split(target.address, 1)[1], opened["id"], opened["api_key"]


def _completion(**more: object) -> bytes:
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    return json.dumps({"model": "any", "messages": messages, **more}).encode()


def _in_session(target: Target, body: bytes) -> str:
    """Posts a completion in a session of its own, which is closed again."""
    path, name, key = _open_session(target)
    try:
        return post(target, f"{path}/chat/completions", body, key)[0]
    finally:
        _delete_session(target, name)


def _delete_session(target: Target, name: str) -> None:
    connection = http.client.HTTPConnection(target.address, timeout=60)
    connection.request("DELETE", f"/sessions/{name}", headers=_bearer(target.secret))
    connection.getresponse().read()
    connection.close()


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _proxy_no_key(target: Target, rng: random.Random) -> str:
    path = rng.choice(("/sessions", "/sessions/abc/finish"))
    return post(target, path, _junk(rng, 0, 1000), rng.choice((None, "wrong")))[0]


def _proxy_strange_session(target: Target, rng: random.Random) -> str:
    path = f"/sessions/{rng.randbytes(6).hex()}/v1/chat/completions"
    return post(target, path, _completion(), rng.randbytes(9).hex())[0]


def _proxy_bad_json(target: Target, rng: random.Random) -> str:
    bodies = (b"{", b"[" * 100_000, b"\xff\xfe", b'{"messages": 1}', _junk(rng, 1, 300), b"null")
    return _in_session(target, rng.choice(bodies))


def _proxy_long_message(target: Target, rng: random.Random) -> str:
    message = {"role": "user", "content": "1 " * rng.randint(1 << 18, 1 << 20)}
    return _in_session(target, _completion(messages=[message]))


def _proxy_many_tools(target: Target, rng: random.Random) -> str:
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": {}}}
        for n in range(rng.randint(3_000, 10_000))
    ]
    return _in_session(target, _completion(tools=tools))


def _proxy_hang_up(target: Target, rng: random.Random) -> str:
    """Sends half a body, or a whole one and does not wait for the answer."""
    path, name, key = _open_session(target)
    body = _completion(stream=rng.random() < 0.5)
    sent = body if rng.random() < 0.5 else body[: len(body) // 2]
    _send_and_leave(target, f"{path}/chat/completions", sent, len(body), _bearer(key))
    _delete_session(target, name)
    return "left"


def _send_and_leave(
    target: Target, path: str, sent: bytes, length: int, headers: Mapping[str, str]
) -> None:
    host, port = target.address.rsplit(":", 1)
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {length}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + sent)


def _sandbox_bad_json(target: Target, rng: random.Random) -> str:
    bodies = (b"{", b"null", b'{"code": 1}', _junk(rng, 1, 300), b"[" * 50_000)
    return post(target, "/run_code", rng.choice(bodies))[0]


def _sandbox_many_values(target: Target, rng: random.Random) -> str:
    lists = ",".join(["[]"] * rng.randint(200_000, 1_000_000))
    body = f'{{"code": "1", "language": "python", "fetch_files": [{lists}]}}'
    return post(target, "/run_code", body.encode())[0]


def _sandbox_hostile(target: Target, rng: random.Random) -> str:
    """Runs a program that takes what it may not, or does not end."""
    programs = (
        "while True: pass",
        "import os\nwhile True: os.fork()",
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "print('x' * (64 << 20))",
        "import os\nos.kill(1, 9); os.setsid(); os.fork() or __import__('time').sleep(99)",
        "import socket\n"
        "a, b = socket.socketpair()\n"
        "socket.send_fds(a, [b'x'], [0, 1, 2, a.fileno(), b.fileno()])",
    )
    body = {"code": rng.choice(programs), "language": "python", "run_timeout": 1}
    return post(target, "/run_code", json.dumps(body).encode())[0]


def _sandbox_hang_up(target: Target, rng: random.Random) -> str:
    program = "import time; time.sleep(20)"
    body = json.dumps({"code": program, "language": "python", "run_timeout": 30}).encode()
    sent = body if rng.random() < 0.5 else body[:20]
    _send_and_leave(target, "/run_code", sent, len(body), {})
    return "left"


# Name -> (who gets it, what sends it, the right answers).
BAD_REQUESTS: Mapping[str, tuple[str, BadRequest, frozenset[str]]] = {
    "no token": ("server", _server_no_token, frozenset({"UNAUTHENTICATED"})),
    "a wrong token": ("server", _server_wrong_token, frozenset({"UNAUTHENTICATED"})),
    "malformed protobuf": ("server", _server_malformed, frozenset({"INVALID_ARGUMENT"})),
    "many stop ids": ("server", _server_many_stop_ids, frozenset({"INVALID_ARGUMENT"})),
    "a prompt too long": ("server", _server_long_prompt, frozenset({"INVALID_ARGUMENT"})),
    "bad sampling": ("server", _server_bad_sampling, frozenset({"INVALID_ARGUMENT"})),
    "an unknown update": (
        "server",
        _server_unknown_update,
        frozenset({"OK", "NOT_FOUND", "FAILED_PRECONDITION"}),
    ),
    "a wrong update": (
        "server",
        _server_wrong_update,
        frozenset({"INVALID_ARGUMENT", "FAILED_PRECONDITION"}),
    ),
    "a hang-up": ("server", _server_hang_up, frozenset({"left"})),
    "a half-open connection": ("server", _half_open, frozenset({"left"})),
    "proxy: no key": ("proxy", _proxy_no_key, frozenset({"401"})),
    "proxy: a strange session": ("proxy", _proxy_strange_session, frozenset({"401", "404"})),
    "proxy: bad JSON": ("proxy", _proxy_bad_json, frozenset({"400"})),
    "proxy: a long message": ("proxy", _proxy_long_message, frozenset({"400"})),
    "proxy: many tools": ("proxy", _proxy_many_tools, frozenset({"400"})),
    "proxy: a hang-up": ("proxy", _proxy_hang_up, frozenset({"left"})),
    "proxy: a half-open connection": ("proxy", _half_open, frozenset({"left"})),
    "sandbox: bad JSON": ("sandbox", _sandbox_bad_json, frozenset({"400", "422"})),
    "sandbox: many values": ("sandbox", _sandbox_many_values, frozenset({"413", "422"})),
    "sandbox: a hostile program": ("sandbox", _sandbox_hostile, frozenset({"200"})),
    "sandbox: a hang-up": ("sandbox", _sandbox_hang_up, frozenset({"left"})),
    "sandbox: a half-open connection": ("sandbox", _half_open, frozenset({"left"})),
}


def check_good_requests(targets: Mapping[str, Target]) -> list[str]:
    """Sends a good request to the proxy and to the sandbox; returns what is wrong with answers."""
    problems = []
    for name, send in (("proxy", _good_completion), ("sandbox", _good_program)):
        if (target := targets.get(name)) is None:
            continue
        try:
            problem = send(target)
        except _UNANSWERED as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            problems.append(f"the {name} answered a good request with {problem}")
    return problems


def _good_completion(target: Target) -> str | None:
    status = _in_session(target, _completion())
    return None if status == "200" else status


def _good_program(target: Target) -> str | None:
    body = json.dumps({"code": "print(6 * 7)", "language": "python"}).encode()
    status, answer = post(target, "/run_code", body)
    if status == "200" and json.loads(answer)["run_result"]["stdout"] == "42\n":
        return None
    return f"{status}: {answer[:200]!r}"


class BadRequests:
    """Sends bad requests from a thread for as long as its block lasts.

    Args:
        targets: The proxy and the sandbox server, those that there are.
        log: Counts each request, and gets the wrong answers.
        servers: Returns the rollout servers of the run, as they are at the moment.
        seed: Of the order and of the contents.
        pause_s: The most seconds between two.
    """

    def __init__(
        self,
        targets: Mapping[str, Target],
        log: Log,
        servers: Callable[[], Sequence[Target]],
        *,
        seed: str,
        pause_s: float = 1.5,
    ) -> None:
        self._targets = targets
        self._log = log
        self._servers = servers
        self._rng = random.Random(seed)
        self._pause_s = pause_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bad requests")

    def __enter__(self) -> "BadRequests":
        """Begins."""
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Ends after the request that is under way."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._send_all()
        except Exception:
            self._log.violation(f"no more bad requests are sent:\n{traceback.format_exc()}")

    def _send_all(self) -> None:
        while True:
            names = list(BAD_REQUESTS)
            self._rng.shuffle(names)
            for name in names:
                if self._end.wait(self._rng.uniform(0, self._pause_s)):
                    return
                self.send(name)
            for problem in check_good_requests(self._targets):
                self._log.violation(problem)

    def send(self, name: str) -> None:
        """Sends one bad request, and notes a wrong answer as a violation."""
        who, function, right = BAD_REQUESTS[name]
        request_seed = self._rng.getrandbits(32)
        chance = random.Random(request_seed)
        if who == "server":
            servers = self._servers()
            if not servers:
                return
            target, right = chance.choice(servers), right | _GONE
        elif who in self._targets:
            target = self._targets[who]
        else:
            return
        try:
            answer = function(target, chance)
        except _UNANSWERED as error:
            answer = f"{type(error).__name__}: {error}"
        self._log.count("bad request", name)
        if answer not in right:
            self._log.violation(f"{name} (seed {request_seed}) was answered {answer!r}")
