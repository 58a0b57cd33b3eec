import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.tools.sandbox import Execution, Program, RunStatus, SandboxError
from treadle.tools.sandbox.wire import (
    InvalidRequestError,
    decode_request,
    decode_response,
    encode_failure,
    encode_request,
    encode_response,
)

FILES = st.dictionaries(st.text(min_size=1), st.binary(max_size=20), max_size=3)
PROGRAMS = st.builds(
    Program,
    code=st.text(),
    timeout_s=st.floats(min_value=0.01, max_value=1e6),
    language=st.sampled_from(["python", "bash", "cpp"]),
    memory_limit_mib=st.none() | st.integers(1, 1 << 20),
    stdin=st.none() | st.text(),
    files=FILES,
    fetch_files=st.lists(st.text(), max_size=3).map(tuple),
)


@given(PROGRAMS)
def test_a_program_travels_unchanged(program: Program) -> None:
    assert decode_request(encode_request(program)) == program


@given(
    st.builds(
        Execution,
        status=st.just(RunStatus.FINISHED),
        stdout=st.text(),
        stderr=st.text(),
        return_code=st.integers(-64, 255),
        execution_s=st.floats(min_value=0, max_value=1e6),
        files=FILES,
    )
)
def test_an_execution_travels_unchanged(execution: Execution) -> None:
    assert decode_response(encode_response(execution)) == execution


def test_the_request_is_what_verl_sends() -> None:
    program = Program(code="print(1)", timeout_s=30, memory_limit_mib=1024)
    assert encode_request(program) == {
        "compile_timeout": 30,
        "run_timeout": 30,
        "code": "print(1)",
        "stdin": None,
        "memory_limit_MB": 1024,
        "language": "python",
        "files": {},
        "fetch_files": [],
    }


def test_the_services_defaults() -> None:
    assert decode_request({"code": "", "language": "python"}) == Program(code="", timeout_s=10)


@pytest.mark.parametrize(
    ("status", "return_code", "says"),
    [
        (RunStatus.FINISHED, 0, "Success"),
        (RunStatus.FINISHED, 1, "Failed"),
        (RunStatus.FINISHED, -9, "Failed"),
        (RunStatus.TIMED_OUT, None, "Failed"),
    ],
)
def test_the_response_is_sandbox_fusions(
    status: RunStatus, return_code: int | None, says: str
) -> None:
    execution = Execution(
        status=status, stdout="a", stderr="b", return_code=return_code, execution_s=0.5
    )
    assert encode_response(execution) == {
        "status": says,
        "message": "",
        "compile_result": None,
        "run_result": {
            "status": status.value,
            "execution_time": 0.5,
            "return_code": return_code,
            "stdout": "a",
            "stderr": "b",
        },
        "executor_pod_name": None,
        "files": {},
    }


@pytest.mark.parametrize(
    ("body", "field", "reason"),
    [
        ([], "body", "must be a JSON object"),
        ({"language": "python"}, "code", "a string is needed"),
        ({"code": 3, "language": "python"}, "code", "a string is needed"),
        ({"code": "", "language": None}, "language", "a string is needed"),
        ({"code": "", "language": "python", "cod": ""}, "cod", "unknown; known are code"),
        ({"code": "", "language": "python", "run_timeout": "9"}, "run_timeout", "a number"),
        ({"code": "", "language": "python", "run_timeout": 0}, "run_timeout", "above 0"),
        ({"code": "", "language": "python", "run_timeout": math.nan}, "run_timeout", "above 0"),
        ({"code": "", "language": "python", "run_timeout": True}, "run_timeout", "a number"),
        ({"code": "", "language": "python", "compile_timeout": "x"}, "compile_timeout", "number"),
        ({"code": "", "language": "python", "memory_limit_MB": 1.5}, "memory_limit_MB", "integer"),
        ({"code": "", "language": "python", "stdin": 1}, "stdin", "a string or null"),
        ({"code": "", "language": "python", "files": []}, "files", "must be an object"),
        ({"code": "", "language": "python", "files": {"a": "?"}}, "files", "'a' is not base64"),
        ({"code": "", "language": "python", "fetch_files": [1]}, "fetch_files", "list of strings"),
    ],
)
def test_a_wrong_request_names_its_field(body: object, field: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as error:
        decode_request(body)
    assert error.value.field == field


def test_a_failure_of_the_sandbox_is_an_error_and_no_result() -> None:
    with pytest.raises(SandboxError, match="the sandbox failed: no disk"):
        decode_response(encode_failure("no disk"))
    error = {"status": "Error", "stderr": "no runner", "return_code": None}
    with pytest.raises(SandboxError, match="the sandbox failed: no runner"):
        decode_response({"status": "Success", "compile_result": None, "run_result": error})


def test_code_that_did_not_compile_is_a_result() -> None:
    compiled = {
        "status": "Finished",
        "execution_time": 0.1,
        "return_code": 1,
        "stdout": None,
        "stderr": "expected ;",
    }
    body = {"status": "Failed", "message": "", "compile_result": compiled, "run_result": None}
    assert decode_response(body).stderr == "expected ;"


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(["status", "run_result", "compile_result", "files"]), inner
            )
        ),
    )
)
def test_any_other_answer_is_an_error_too(body: object) -> None:
    with pytest.raises(SandboxError):
        decode_response(body)
