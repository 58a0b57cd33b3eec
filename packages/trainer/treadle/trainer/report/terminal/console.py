"""The summary of a run as a table at its end, on a terminal or as plain text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from treadle.trainer.report.summary import Summary, summary_rows

if TYPE_CHECKING:
    from rich.console import Console


def print_summary(summary: Summary, run_dir: Path, *, console: Console | None = None) -> None:
    """Prints what the run reached, where its time went, and where its files are.

    Args:
        console: Where to print. None: standard output.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    header, *rows = summary_rows(summary, run_dir)
    numbers = Table(box=SIMPLE_HEAD, title="Summary", title_justify="left", title_style="bold")
    numbers.add_column(header[0])
    numbers.add_column(header[1], justify="right")
    numbers.add_column(header[2], justify="right", style="bold")
    texts = Table.grid(padding=(0, 2))
    for what, start, end in rows:
        if start:
            numbers.add_row(what, start, end)
        else:
            texts.add_row(f"  {what}", Text(end, overflow="fold"))
    console = console or Console()
    console.print(numbers)
    console.print(texts)
