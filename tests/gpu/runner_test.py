"""Checks end in every way, in real processes; the page says so."""

import os
import select
from dataclasses import replace
from pathlib import Path

import pytest
from gpu.check import Check, Context
from gpu.page import page
from gpu.runner import Outcome, Result, run_all
from gpu.sample_checks import CHECKS

TABLE = "gpu.sample_checks"


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(device="cpu", num_gpus=0, folder=tmp_path, engines={}, model=None)


def run(checks: list[Check], context: Context) -> list[Result]:
    return run_all(checks, context, table=TABLE, after_each=lambda _: None)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("logs")
    context = Context(device="cpu", num_gpus=0, folder=folder, engines={}, model=None)
    return {result.check.name: result for result in run([*CHECKS], context)}


def test_a_failure_stops_only_what_needs_it(results: dict[str, Result]) -> None:
    assert {name: result.outcome for name, result in results.items()} == {
        "holds": Outcome.HOLDS,
        "fails": Outcome.FAILS,
        "cannot": Outcome.SKIPPED,
        "raises": Outcome.FAILS,
        "crashes": Outcome.FAILS,
        "hangs": Outcome.FAILS,
        "after_fails": Outcome.SKIPPED,
        "after_that": Outcome.SKIPPED,
        "with_engine": Outcome.SKIPPED,
        "on_a_gpu": Outcome.SKIPPED,
        "still_holds": Outcome.HOLDS,
    }
    assert results["holds"].figures == {"device": "cpu", "tokens/s": 12345.6}
    assert results["holds"].seconds > 0


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("fails", "3 were seen | 4 were expected"),
        ("raises", "ValueError: an unknown key"),
        ("cannot", "no interpreter is known"),
        ("crashes", "ended with status 9\nthe last words"),
        ("hangs", "not done after 1 s"),
        ("after_fails", "needs fails, which fails"),
        ("after_that", "needs after_fails, which was skipped"),
        ("with_engine", "no environment of vllm was named: --vllm COMMAND"),
        ("on_a_gpu", "only a GPU shows it: the CPU has no NCCL"),
    ],
)
def test_what_was_seen_is_said(results: dict[str, Result], name: str, seen: str) -> None:
    assert results[name].seen.startswith(seen)


def test_what_a_check_leaves_behind_is_ended(context: Context) -> None:
    run([check for check in CHECKS if check.name == "crashes"], context)
    try:
        handle = os.pidfd_open(int((context.folder / "crashes" / "left").read_text()))
    except ProcessLookupError:
        return
    select.select([handle], [], [])  # returns when it has ended
    os.close(handle)


def test_a_check_that_time_ran_out_for_has_no_result(context: Context) -> None:
    holds, hangs = (c for c in CHECKS if c.name in ("hangs", "holds"))
    slow = replace(hangs, limit_s=60.0)
    results = run_all([slow, holds], context, table=TABLE, after_each=lambda _: None, seconds=1.0)
    assert results == []
    # One that had three times its usual time does not keep those after it from their turn for ever.
    usual = replace(slow, about_s=0.1)
    (result,) = run_all([usual], context, table=TABLE, after_each=lambda _: None, seconds=1.0)
    assert (result.outcome, result.seen[:14]) == (Outcome.FAILS, "not done after")
    (result,) = run([holds], context)
    again = run_all([holds], context, table=TABLE, after_each=lambda _: None, before=[result])
    assert again == [result]


def test_a_machine_with_too_few_gpus_skips(context: Context) -> None:
    two = replace(CHECKS[0], gpus=2)
    (result,) = run([two], replace(context, device="cuda", num_gpus=1))
    assert (result.outcome, result.seen) == (Outcome.SKIPPED, "needs 2 GPUs, and there are 1")


def test_the_page_has_every_outcome_and_what_failed(results: dict[str, Result]) -> None:
    text = page([("GPUs", "2 x A | B")], [*results.values()], title="Results", planned=12)
    assert text.startswith("# Results\n\n2 hold, 4 fail, 5 skipped. NOT COMPLETE: 1 were not")
    assert "| GPUs | 2 x A \\| B |" in text
    assert f"{results['holds'].seconds:.1f} | device: cpu; tokens/s: 12,346 |" in text
    assert "| on_a_gpu | skipped |  | only a GPU shows it: the CPU has no NCCL |" in text
    assert "## crashes fails" in text and "the last words" in text
    assert "3 were seen | 4 were expected\nand a second line\n```" in text
