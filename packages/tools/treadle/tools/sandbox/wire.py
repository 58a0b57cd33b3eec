"""SandboxFusion's `POST /run_code`, as JSON values, in both directions.

Invariant: what one side encodes the other decodes to the same program or execution, and a value of
the wrong shape is an error that names it, never a guess. All functions are pure. Fields and rules:
SandboxFusion `server-20250609`; the seconds of the queue and whether an interpreter was warm are
ours, and travel as headers so that the body stays SandboxFusion's.

| the program | `status` | `run_result.status` | `run_result.return_code` |
|---|---|---|---|
| ended with 0 | Success | Finished | 0 |
| ended otherwise | Failed | Finished | as it is |
| ran too long | Failed | TimeLimitExceeded | null |
| (the sandbox failed) | SandboxError | Error, or no `run_result` | null |
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Final

from treadle.tools.sandbox.execution import Execution, Program, RunStatus, SandboxError

QUEUE_HEADER: Final = "x-treadle-queue-s"
WARM_HEADER: Final = "x-treadle-warm"
_DEFAULT_TIMEOUT_S: Final = 10.0
_REQUEST_KEYS: Final = (
    "code",
    "language",
    "compile_timeout",
    "run_timeout",
    "memory_limit_MB",
    "stdin",
    "files",
    "fetch_files",
)


class InvalidRequestError(Exception):
    """A field of a request is missing, unknown or has a wrong value."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


def encode_request(program: Program) -> dict[str, object]:
    """Returns the body of a request, with the keys that verl sends."""
    return {
        "compile_timeout": program.timeout_s,
        "run_timeout": program.timeout_s,
        "code": program.code,
        "stdin": program.stdin,
        "memory_limit_MB": -1 if program.memory_limit_mib is None else program.memory_limit_mib,
        "language": program.language,
        "files": {n: base64.b64encode(c).decode() for n, c in program.files.items()},
        "fetch_files": list(program.fetch_files),
    }


def decode_request(body: object) -> Program:
    """Returns the program of a request; `compile_timeout` has no effect, as nothing is compiled.

    Raises:
        InvalidRequestError: It is not one.
    """
    if not isinstance(body, dict):
        raise InvalidRequestError("body", "must be a JSON object")
    for key in body:
        if key not in _REQUEST_KEYS:
            raise InvalidRequestError(str(key), f"unknown; known are {', '.join(_REQUEST_KEYS)}")
    for key in ("code", "language"):
        if not isinstance(body.get(key), str):
            raise InvalidRequestError(key, "a string is needed")
    _number(body, "compile_timeout", _DEFAULT_TIMEOUT_S)
    memory_mib = body.get("memory_limit_MB", -1)
    if type(memory_mib) is not int:
        raise InvalidRequestError("memory_limit_MB", "must be an integer; -1 for the server's own")
    stdin = body.get("stdin")
    if not (stdin is None or isinstance(stdin, str)):
        raise InvalidRequestError("stdin", "must be a string or null")
    names = body.get("fetch_files", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidRequestError("fetch_files", "must be a list of strings")
    try:
        return Program(
            code=body["code"],
            timeout_s=_number(body, "run_timeout", _DEFAULT_TIMEOUT_S),
            language=body["language"],
            memory_limit_mib=memory_mib if memory_mib > 0 else None,
            stdin=stdin,
            files=_files(body.get("files", {})),
            fetch_files=tuple(names),
        )
    except ValueError as error:
        raise InvalidRequestError("run_timeout", str(error)) from None


def encode_response(execution: Execution) -> dict[str, object]:
    """Returns the body of the answer to a program that ran."""
    well = execution.status is RunStatus.FINISHED and execution.return_code == 0
    return _response("Success" if well else "Failed", "", execution)


def encode_failure(message: str) -> dict[str, object]:
    """Returns the body of the answer when the sandbox failed."""
    return _response("SandboxError", message, None)


def decode_response(body: object, *, warm: bool = False) -> Execution:
    """Returns the execution in an answer.

    Raises:
        SandboxError: The answer reports a failure of the sandbox, or has another shape.
    """
    try:
        assert isinstance(body, dict)
        if body["status"] == "SandboxError":
            raise SandboxError(f"the sandbox failed: {body.get('message') or body}")
        for result in (body["compile_result"], body["run_result"]):
            if result is not None and result["status"] == "Error":
                raise SandboxError(f"the sandbox failed: {result.get('stderr') or body}")
        # A program that did not compile has only the one.
        result = body["run_result"] if body["run_result"] is not None else body["compile_result"]
        return Execution(
            status=RunStatus(result["status"]),
            stdout=result["stdout"] or "",
            stderr=result["stderr"] or "",
            return_code=result["return_code"],
            execution_s=float(result["execution_time"] or 0.0),
            files=_files(body.get("files") or {}),
            warm=warm,
        )
    except (
        AssertionError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        InvalidRequestError,
    ) as error:
        raise SandboxError(
            f"the sandbox's answer is not one of /run_code ({error!r}): {str(body)[:200]}"
        ) from error


def _response(status: str, message: str, execution: Execution | None) -> dict[str, object]:
    files = execution.files if execution else {}
    return {
        "status": status,
        "message": message,
        "compile_result": None,
        "run_result": None if execution is None else _command_result(execution),
        "executor_pod_name": None,
        "files": {name: base64.b64encode(content).decode() for name, content in files.items()},
    }


def _command_result(execution: Execution) -> dict[str, object]:
    return {
        "status": execution.status.value,
        "execution_time": execution.execution_s,
        "return_code": execution.return_code,
        "stdout": execution.stdout,
        "stderr": execution.stderr,
    }


def _number(body: Mapping[str, object], key: str, default: float) -> float:
    value = body.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(key, "must be a number of seconds")
    try:
        return float(value)
    except OverflowError:
        raise InvalidRequestError(key, "is too large for a number of seconds") from None


def _files(value: object) -> dict[str, bytes]:
    if not isinstance(value, dict):
        raise InvalidRequestError("files", "must be an object of names and base64")
    files = {}
    for name, content in value.items():
        if content is None:
            continue  # SandboxFusion's way to say: none
        try:
            files[name] = base64.b64decode(content, validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise InvalidRequestError("files", f"{name!r} is not base64") from None
    return files
