from pathlib import Path

import pytest
from count_tests import main

REPORT = """<testsuites><testsuite>
  <testcase name="a"/><testcase name="b"/>
  {more}
</testsuite></testsuites>"""


def summary(tmp_path: Path, capsys: pytest.CaptureFixture[str], *commands: str) -> tuple[int, str]:
    status = main([str(tmp_path), *commands])
    return status, capsys.readouterr().out.splitlines()[-1]


def test_tests_are_summed_over_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.xml").write_text(REPORT.format(more=""))
    (tmp_path / "two.xml").write_text(REPORT.format(more="<testcase><skipped/></testcase>"))
    assert summary(tmp_path, capsys, "lint check=0", "test=0") == (
        0,
        "4 passed, 0 failed, 1 skipped",
    )


def test_failures_and_errors_are_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = "<testcase><failure/></testcase><testcase><error/></testcase>"
    (tmp_path / "one.xml").write_text(REPORT.format(more=more))
    commands = ("lint check=0", "test=1", "test with the real engines=1")
    assert summary(tmp_path, capsys, *commands) == (1, "2 passed, 2 failed")


def test_what_failed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = """
      <testcase classname="x_test" name="test_c"><failure message="AssertionError: 1&#10; + 2"/>
      </testcase><testcase classname="y_test" name="test_d"><error/></testcase>"""
    (tmp_path / "one.xml").write_text(REPORT.format(more=more))
    main([str(tmp_path), "lint check=2", "test=1"])
    assert capsys.readouterr().out.splitlines()[:-1] == [
        "FAILED x_test.test_c: AssertionError: 1",
        "FAILED y_test.test_d: ",
        "lint check: exit status 2, for which no test is the cause: see above",
        "test: exit status 1",
    ]


@pytest.mark.parametrize("commands", [("lint check=1", "test=0"), ("lint check=0", "test=124")])
def test_a_command_that_failed_without_a_report_is_one_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], commands: tuple[str, ...]
) -> None:
    (tmp_path / "one.xml").write_text(REPORT.format(more=""))
    assert summary(tmp_path, capsys, *commands) == (1, "2 passed, 1 failed")


def test_no_report_at_all_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert summary(tmp_path, capsys, "lint check=0", "test=0") == (1, "0 passed, 1 failed")
