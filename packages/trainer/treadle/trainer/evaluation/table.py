"""The table of an evaluation, as plain text of any width."""

from collections.abc import Sequence

from treadle.trainer.evaluation.scores import ALL, Estimate, Scores
from treadle.trainer.report.at_k import Interval

__all__ = ["table"]


def table(scores: Sequence[Scores]) -> str:
    """Returns the tables, with the meaning of their terms.

    They are what was scored; with several samples per row, what all of them give together; and how
    the trajectories ended.

    Args:
        scores: Per data source, and of all rows last.
    """
    shown = scores if len(scores) > 2 else [s for s in scores if s.data_source != ALL]
    terms = ["± is one standard error, over the rows."]
    if any(each.accuracy for each in shown):
        terms.append("A success, for accuracy and pass@k, is a right answer; a failure is none.")
    else:
        terms.append(
            "No accuracy and no pass@k: the reward does not tell right from wrong. It does where "
            "it is 0 or 1 and no weighted sum, or gives `accuracy` beside a score."
        )
    parts = [_scored(shown), _ended(shown)]
    if together := _together(shown):
        parts.insert(1, together)
        terms.append("In brackets is the 95% interval, over the rows.")
    return "\n\n".join([*map(_columns, parts), " ".join(terms)])


def _scored(scores: Sequence[Scores]) -> list[list[str]]:
    ks = sorted({k for each in scores for k in each.pass_at})
    ks = ks if len(ks) > 1 else []  # pass@1 alone is the accuracy
    told = any(each.accuracy for each in scores)
    head = ["data source", "rows", "samples", "reward", *(["accuracy"] if told else [])]
    lines = [[*head, *(f"pass@{k}" for k in ks)]]
    for each in scores:
        line = [each.data_source, str(each.rows), str(each.samples), _number(each.reward)]
        if told:
            line.append("-" if each.accuracy is None else _share_of(each.accuracy))
        line += [_share(each.pass_at.get(k)) for k in ks]
        lines.append(line)
    return lines


def _together(scores: Sequence[Scores]) -> list[list[str]]:
    """Returns mean, best, worst and majority of all samples of a row; nothing for one sample.

    They are computed from the accuracy, or from the reward if it gives no accuracy.
    """
    names = list(dict.fromkeys(name for each in scores for name in each.at_k))
    names = [name for name in names if name.startswith("accuracy/")] or names
    largest = max((int(name.partition("@")[2]) for name in names), default=0)
    names = [name for name in names if name.endswith(f"@{largest}")]
    if not names:
        return []
    lines = [["data source", *(name.replace("/", " ") for name in names)]]
    for each in scores:
        lines.append([each.data_source, *(_interval(each.at_k.get(name)) for name in names)])
    return lines


def _ended(scores: Sequence[Scores]) -> list[list[str]]:
    stops = list(dict.fromkeys(stop for each in scores for stop in each.stops))
    lines = [["data source", "failed", "called a tool", "turns", "tokens", "longest", *stops]]
    for each in scores:
        tokens = each.response_tokens
        lines.append(
            [
                each.data_source,
                str(each.failed),
                _share(each.tool_call_rate),
                "-" if each.turns is None else f"{each.turns:.1f}",
                "-" if tokens is None else f"{tokens.mean:.1f}",
                "-" if tokens is None else str(tokens.max),
                *(_share(each.stops.get(stop, 0.0) if each.stops else None) for stop in stops),
            ]
        )
    return lines


def _number(value: Estimate) -> str:
    error = value.standard_error
    return f"{value.mean:.4g}" if error is None else f"{value.mean:.4f} ± {error:.4f}"


def _interval(value: Interval | None) -> str:
    if value is None:
        return "-"
    if value.low is None:
        return f"{value.mean:.4g}"
    return f"{value.mean:.3f} [{value.low:.3f}, {value.high:.3f}]"


def _share_of(value: Estimate) -> str:
    error = value.standard_error
    return f"{value.mean:.1%}" if error is None else f"{value.mean:.1%} ± {error:.1%}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _columns(lines: Sequence[Sequence[str]]) -> str:
    """Returns the lines with the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [
                line[0].ljust(widths[0]),
                *(t.rjust(w) for t, w in zip(line[1:], widths[1:], strict=True)),
            ]
        )
        for line in lines
    )
