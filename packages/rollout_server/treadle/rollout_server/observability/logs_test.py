import json
import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest

from treadle.rollout_server.observability.logs import JsonFormatter, TextFormatter, name_call


def record(message: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord("treadle.x", logging.WARNING, "x.py", 1, message, args, None)


@pytest.fixture(autouse=True)
def no_names() -> None:
    name_call(object())


def test_a_line_of_json_says_when_who_and_which_call() -> None:
    name_call(SimpleNamespace(request_id="r-1", session_id="", prompt=(1, 2)))
    line = JsonFormatter().format(record("%d tokens\nof é", 3))
    assert "\n" not in line
    fields = json.loads(line)
    assert fields.pop("time").endswith("Z")
    assert fields == {
        "level": "WARNING",
        "logger": "treadle.x",
        "message": "3 tokens\nof é",
        "request_id": "r-1",
    }


def test_a_line_of_text_names_the_call_at_its_end() -> None:
    assert TextFormatter().format(record("plain")).endswith("WARNING treadle.x: plain")
    name_call(SimpleNamespace(update_id="u"))
    assert TextFormatter().format(record("named")).endswith("treadle.x: named [update_id=u]")


def test_a_name_that_a_client_chose_adds_no_line() -> None:
    name_call(SimpleNamespace(request_id="a\nforged"))
    assert TextFormatter().format(record("x")).endswith("x [request_id='a\\nforged']")


def test_what_a_model_wrote_moves_no_cursor() -> None:
    wrote = record("a tool %s", "\x1b]0;x\x07 \x9b2J \u202e")
    assert TextFormatter().format(wrote).endswith(r"a tool \x1b]0;x\x07 \x9b2J \u202e")
    line = JsonFormatter().format(wrote)
    assert line.isprintable()
    assert json.loads(line)["message"] == wrote.getMessage()


def test_nobody_writes_past_the_format() -> None:
    program = """
import threading, warnings
from treadle.rollout_server.observability.logs import set_up
set_up("INFO", "json")
warnings.warn("careful")
def fail(): raise RuntimeError("in a thread")
thread = threading.Thread(target=fail, name="worker")
thread.start()
thread.join()
raise ValueError("at last")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["level"] for line in lines] == ["WARNING", "CRITICAL", "CRITICAL"]
    assert "careful" in lines[0]["message"]
    assert lines[1]["message"] == "uncaught in thread worker"
    assert "RuntimeError: in a thread" in lines[1]["error"]
    assert "ValueError: at last" in lines[2]["error"]
    assert done.returncode == 1
