"""Requests and answers in files, between a thread that asks and one that is the driver."""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.trainer.cli.servers import main
from treadle.trainer.rollout.control.control_files import (
    Answer,
    ControlError,
    Request,
    ask,
    make_directory,
    read_list,
    take_requests,
    write_answer,
    write_list,
)

_ADD = Request(action="add", which="a:1")


DAMAGED = (
    *(b"\xff\xfe{}", b"[" * 200_000, b"[]", b"null", b"", b"1" * 100_000),
    b'{"action":"add","which":"a:1","now":' + b"9" * 5000 + b"}",
    b'{"action":"add","which":5}',
    b'{"action":"explode","which":"a:1"}',
    b'{"action":["add"],"which":"a:1"}',
    b'{"action":"drain","which":{"a":1}}',
    b'{"action":"drain","which":"a:1","now":1}',
    b'{"action":"add","which":"\\ud800:1"}',
    b'{"action":"add","which":"a:1\\n"}',
    b'{"action":"add","colour":"red"}',
    b'{"action":"add","which":"' + b"a" * 5000 + b'"}',
)


def write_request(path: Path, request: Request) -> None:
    path.write_text(json.dumps(asdict(request)))


def _take(directory: Path) -> tuple[str, Request | Answer]:
    while not (taken := take_requests(directory)):
        pass
    ((name, request),) = taken
    return name, request


def test_answers_follow_until_the_last(tmp_path: Path) -> None:
    directory = make_directory(tmp_path)
    write_list(directory, [{"address": "b:1"}])
    said: list[str] = []
    with ThreadPoolExecutor(1) as others:
        asking = others.submit(ask, tmp_path, _ADD, say=said.append)
        name, request = _take(directory)
        assert request == _ADD
        write_answer(directory, name, Answer(state="accepted", text="it fits"))
        while not said:
            pass
        write_answer(directory, name, Answer(state="done", text="it serves"))
        assert asking.result() == "it serves"
        asking = others.submit(ask, tmp_path, _ADD, say=said.append)
        name, _ = _take(directory)
        write_answer(directory, name, Answer(state="refused", text="another tokenizer"))
        with pytest.raises(ControlError, match="another tokenizer"):
            asking.result()
    assert said == ["it fits"]
    assert [path.name for path in directory.iterdir()] == ["list.json"]
    assert read_list(tmp_path)[1] == [{"address": "b:1"}]


def test_a_request_that_nobody_takes_is_withdrawn(tmp_path: Path) -> None:
    directory = make_directory(tmp_path)
    write_list(directory, [])
    with pytest.raises(ControlError, match=r"no trainer took the request within 0 s: .* does not"):
        ask(tmp_path, _ADD, say=print, claim_s=0)
    assert take_requests(directory) == []


def test_a_request_that_is_not_one_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    directory = make_directory(tmp_path)
    assert directory.stat().st_mode & 0o777 == 0o700
    for number, content in enumerate(DAMAGED):
        (directory / f"{number:03}.request").write_bytes(content)
    (directory / "directory.request" / "in").mkdir(parents=True)
    (directory / "link.request").symlink_to("/dev/zero")
    os.mkfifo(directory / "pipe.request")
    write_request(directory / "z.request", _ADD)
    *taken, (name, request) = take_requests(directory)
    assert len(taken) == len(DAMAGED) + 3
    for _, answer in taken:
        assert isinstance(answer, Answer)
        assert answer.state == "refused"
        assert len(answer.text) < 400
    assert (name, request) == ("z", _ADD)
    assert not list(directory.iterdir())


@given(content=st.binary(max_size=64) | st.from_regex(rb'\{"action":"add","which":.{,20}\}'))
def test_any_bytes_are_a_request_or_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    directory = make_directory(tmp_path_factory.mktemp("run"))
    (directory / "x.request").write_bytes(content)
    assert [name for name, _ in take_requests(directory)] == ["x"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["list"], "has no servers now"),
        (["add", "a:1"], "has no servers now"),
        (["drain", "a:1"], "has no servers now"),
    ],
)
def test_a_run_that_does_not_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: Sequence[str], said: str
) -> None:
    assert main([*arguments, f"--run-dir={tmp_path}"]) == 2
    assert said in capsys.readouterr().err
    assert main([*arguments, "--run-dir=/nowhere"]) == 2
    assert "--run-dir /nowhere is not a directory" in capsys.readouterr().err
