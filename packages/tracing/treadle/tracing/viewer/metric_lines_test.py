import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.tracing.viewer import metric_lines
from treadle.tracing.viewer.metric_lines import START, InvalidCursorError, read_increment


def _append(path: Path, *steps: int) -> None:
    with path.open("a") as file:
        file.writelines(f'{{"step": {step}, "reward/mean": {step / 2}}}\n' for step in steps)


def _steps(lines: list[dict[str, float | None]]) -> list[float | None]:
    return [line["step"] for line in lines]


def test_each_line_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_increment(path).lines == []
    _append(path, 1, 2)
    first = read_increment(path)
    assert first.lines == [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 1.0}]
    assert read_increment(path, first.cursor).lines == []
    _append(path, 3)
    second = read_increment(path, first.cursor)
    assert (_steps(second.lines), second.restarted) == ([3], False)


def test_a_line_that_is_being_written_waits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _append(path, 1)
    with path.open("a") as file:
        file.write('{"step": 2, ')
    first = read_increment(path)
    assert (_steps(first.lines), first.damaged) == ([1], 0)
    with path.open("a") as file:
        file.write('"x": 1}\n')
    assert read_increment(path, first.cursor).lines == [{"step": 2, "x": 1}]


def test_a_log_that_was_rewritten_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _append(path, 1, 2, 3)
    cursor = read_increment(path).cursor
    path.unlink()
    assert read_increment(path, cursor).restarted
    _append(path, 1, 7, 8, 9)  # As long as before, and longer: a run that resumed after step 1.
    again = read_increment(path, cursor)
    assert (_steps(again.lines), again.restarted) == ([1, 7, 8, 9], True)
    assert not read_increment(path, again.cursor).restarted


def test_damaged_lines_are_counted_and_what_is_not_finite_is_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "x": NaN}\nnonsense\n[]\n{"step": 2, "x": "text"}\n')
    _append(path, 3)
    found = read_increment(path)
    assert found.lines == [{"step": 1, "x": None}, {"step": 3, "reward/mean": 1.5}]
    assert found.damaged == 3


@pytest.mark.parametrize("cursor", ["", "1", "-1-0", "x-y", "1-2-3", "٣-0", "9" * 20 + "-0"])
def test_a_malformed_cursor_is_refused(tmp_path: Path, cursor: str) -> None:
    with pytest.raises(InvalidCursorError, match="begin again with 0-0"):
        read_increment(tmp_path / "metrics.jsonl", cursor)


@given(
    lines=st.lists(st.one_of(st.integers(0, 99).map(lambda s: json.dumps({"step": s})), st.text())),
    at_once=st.integers(8, 64),
)
def test_increments_of_any_size_hold_what_the_whole_holds(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], at_once: int
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    path.write_bytes("".join(f"{line}\n" for line in lines).encode(errors="replace"))
    whole = read_increment(path)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(metric_lines, "_MAX_BYTES", 32 + at_once)
        found, cursor, more = [], START, True
        while more:
            part = read_increment(path, cursor)
            assert not part.restarted
            found += part.lines
            cursor, more = part.cursor, part.more
    assert found == whole.lines


def test_a_cursor_behind_the_end_of_any_file_begins_again(tmp_path: Path) -> None:
    """No file has that many bytes: the file system refuses to go there."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    found = read_increment(path, "999999999999999-1")
    assert (found.restarted, found.lines) == (True, [{"step": 1}])
