from pathlib import Path

import pytest
from count_tests import main

REPORT = """<testsuites><testsuite>
  <testcase name="a"/><testcase name="b"/>
  {more}
</testsuite></testsuites>"""


def summary(tmp_path: Path, capsys: pytest.CaptureFixture[str], *commands: str) -> tuple[int, str]:
    status = main([str(tmp_path), str(tmp_path / "first"), *commands])
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
    main([str(tmp_path), str(tmp_path / "first"), "lint check=2", "test=1,1"])
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


def tries(tmp_path: Path, *, flaky: int) -> None:
    """Writes the reports of two tries: `flaky` tests failed in the first and then passed."""
    (tmp_path / "first").mkdir()
    cases = [f'<testcase classname="x_test" name="test_{number}">' for number in range(flaky)]
    failed = [f'{case}<failure message="late"/></testcase>' for case in cases]
    (tmp_path / "first" / "one.xml").write_text(REPORT.format(more="".join(failed)))
    passed = [f"{case}</testcase>" for case in cases]
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "one.xml").write_text(REPORT.format(more="".join(passed)))


def test_a_test_that_passes_at_the_second_try_is_flaky(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tries(tmp_path, flaky=3)
    arguments = [str(tmp_path / "reports"), str(tmp_path / "first")]
    assert main([*arguments, "lint check=0", "test=1,0"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "FLAKY x_test.test_0: late",
        "FLAKY x_test.test_1: late",
        "FLAKY x_test.test_2: late",
        "lint check: ok",
        "test: ok at the second try, exit status 1 at the first",
        "5 passed, 0 failed",
    ]


@pytest.mark.parametrize(
    ("flaky", "commands"), [(4, ["test=1,0"]), (0, [f"test of {name}=124,0" for name in "abcd"])]
)
def test_many_flaky_tests_are_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flaky: int, commands: list[str]
) -> None:
    tries(tmp_path, flaky=flaky)
    assert main([str(tmp_path / "reports"), str(tmp_path / "first"), *commands]) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "4 tests failed and passed when run again: more than 3",
        f"{flaky + 2} passed, 1 failed",
    ]
