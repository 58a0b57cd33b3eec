"""`treadle eval SOURCE`: the scores of a model, a run or a running server on a data file."""

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from treadle.trainer.checkpoint.run_directory import new_run_dir
from treadle.trainer.cli.console import exit_text, fail, say
from treadle.trainer.cli.interrupt import Interrupted, until_signal

if TYPE_CHECKING:
    from treadle.trainer.evaluation.results import Results
    from treadle.trainer.evaluation.source import Source

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="treadle eval",
        description="Samples and scores the rows of a data file, with the loops, tools and rewards "
        "of training, and trains nothing. Prints a table, and writes results.json, every "
        "trajectory and a report.",
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a model directory, the id of a model on the Hub, demo:calculator; a run directory, "
        "whose configuration is then the base; the address of a rollout server, host:port; or the "
        "URL of an OpenAI-compatible API, https://HOST/v1, with --model",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="of the model at a URL; the key is taken from the environment variable OPENAI_API_KEY",
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="YAML file, or config.json of a run; may be repeated, later ones win",
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="FILE[,FILE]",
        help="rows to evaluate; data.val_files if left out",
    )
    parser.add_argument(
        "--samples", type=_positive, metavar="N", help="trajectories per row, for pass@k"
    )
    parser.add_argument("--limit", type=_positive, metavar="N", help="only the first N rows")
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="of which checkpoint of the run; the latest one that holds a model if left out",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where to write; a new folder in RUN/eval or ./runs if left out",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="as rollout.val.temperature=0.7"
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status.

    Returns:
        0, every row was evaluated; 1, no trajectory ended well, or no server is left; 2, the input
        is wrong; 130 or 143, it was interrupted.
    """
    from treadle.trainer.evaluation.check import check_evaluation
    from treadle.trainer.evaluation.evaluate import evaluate
    from treadle.trainer.evaluation.settings import load_settings
    from treadle.trainer.evaluation.source import find_source
    from treadle.trainer.launch.process import ProcessError
    from treadle.trainer.preflight.table import INPUT_ERRORS
    from treadle.trainer.rollout.outages import OutageError
    from treadle.trainer.rollout.server_pool import NoServerLeftError

    args = _parser().parse_intermixed_args(argv)
    out = args.out
    try:
        source = find_source(args.source, step=args.step, api_model=args.model)
        out = out or _new_directory(source)
        settings = load_settings(
            source,
            files=args.config,
            overrides=args.overrides,
            data=[file for given in args.data for file in given.split(",")],
            samples=args.samples,
            limit=args.limit,
        )
        for note in settings.notes:
            say(f"note: {note}")
        checked = check_evaluation(settings.config, source, out)
        results = asyncio.run(until_signal(evaluate(checked)))
    except INPUT_ERRORS as error:
        return fail(error)
    except (NoServerLeftError, OutageError, ProcessError) as error:
        return fail(error, status=1)
    except OSError as error:
        where = error.filename or out
        return fail(OSError(f"cannot write {where}: {error.strerror or error}"), status=1)
    except Interrupted as ended:
        begun = (out / "trajectories.jsonl").exists()
        say(f"interrupted; finished rows are in {out}" if begun else "interrupted", error=True)
        return 128 + ended.number
    except SystemExit as exit_:
        say(f"error: {exit_text(exit_)}", error=True)
        return 1
    return _show(results, out)


def _new_directory(source: "Source") -> Path:
    """Returns RUN/eval/step-N-DATE-TIME, or ./runs/eval-NAME-DATE-TIME."""
    if source.run is not None:
        fresh = new_run_dir(f"step-{source.step}")
        return source.run / "eval" / fresh.name
    name = Path(source.text.removeprefix("demo:")).name or "model"
    if source.url is not None:
        name = urlsplit(source.url).netloc
    return new_run_dir(f"eval-{name.replace(':', '-')}")


def _show(results: "Results", out: Path) -> int:
    from treadle.trainer.evaluation.table import table

    say(f"\n{table(results.scores)}\n")
    every = results.scores[-1]
    if len(results.weight_versions) > 1:
        first, last = results.weight_versions[0], results.weight_versions[-1]
        say(f"note: the server got new weights meanwhile: versions {first} to {last} sampled")
    if every.failed:
        say(f"{every.failed} of {every.samples} trajectories failed:", error=True)
        for cause in results.failures:
            say(f"  {cause}", error=True)
    say(f"wrote {out / 'results.json'}; look at the trajectories in {out / 'report.html'}")
    return 1 if every.failed == every.samples else 0
