"""The page of results, as Markdown."""

from collections import Counter
from collections.abc import Iterator, Sequence

from gpu.check import Figures
from gpu.runner import Outcome, Result


def page(
    machine: Sequence[tuple[str, str]], results: Sequence[Result], *, title: str, planned: int
) -> str:
    """Returns the page.

    Args:
        machine: Rows of the machine's table.
        results: Of the checks that were run or skipped.
        title: The heading.
        planned: Number of checks of the whole run; a page with fewer results is not complete.
    """
    return "\n".join(_lines(machine, results, title, planned)) + "\n"


def totals(results: Sequence[Result]) -> str:
    """Returns the totals in one line."""
    counts = Counter(result.outcome for result in results)
    return (
        f"{counts[Outcome.HOLDS]} hold, {counts[Outcome.FAILS]} fail, "
        f"{counts[Outcome.SKIPPED]} skipped"
    )


def line(result: Result) -> str:
    """Returns the outcome of a check in one line."""
    seen = result.seen.splitlines()[0] if result.seen else ""
    text = f"{result.outcome.value:8} {result.check.name:24} {result.seconds:6.1f} s"
    return f"{text}  {seen or figures(result.figures)}".rstrip()


def figures(values: Figures) -> str:
    """Returns figures in one line."""
    return "; ".join(f"{name}: {_value(value)}" for name, value in values.items())


def _value(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def _lines(
    machine: Sequence[tuple[str, str]], results: Sequence[Result], title: str, planned: int
) -> Iterator[str]:
    yield f"# {title}"
    yield ""
    rest = planned - len(results)
    yield totals(results) + (f". NOT COMPLETE: {rest} were not reached." if rest else ".")
    yield ""
    yield "| | |"
    yield "|---|---|"
    for what, which in machine:
        yield f"| {what} | {_cell(which)} |"
    yield ""
    yield "| check | outcome | seconds | figures |"
    yield "|---|---|---|---|"
    for result in results:
        skipped = result.outcome is Outcome.SKIPPED
        time = "" if skipped else f"{result.seconds:.1f}"
        shown = result.seen if skipped else figures(result.figures)
        yield f"| {result.check.name} | {result.outcome.value} | {time} | {_cell(shown)} |"
    for result in results:
        if result.outcome is Outcome.FAILS:
            yield ""
            yield f"## {result.check.name} fails"
            yield ""
            yield f"It is to show: {result.check.shows}"
            yield ""
            yield "```text"
            yield result.seen.replace("```", "'''")
            yield "```"
    yield ""
    yield "## What each check shows"
    yield ""
    for result in results:
        yield f"- `{result.check.name}`: {result.check.shows}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
