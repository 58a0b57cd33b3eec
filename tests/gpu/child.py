"""The process of one check: `python -m gpu.child TABLE NAME CONTEXT ANSWER`.

Writes figures and what was seen to the file ANSWER. The exit status is 0 if the check holds,
`FAILED` if it does not and `SKIPPED` if it cannot run here. Without the file the check crashed.
"""

import atexit
import gc
import importlib
import json
import sys
import traceback
from pathlib import Path

from gpu.check import Check, CheckFailed, CheckSkipped, Context, Figures

FAILED, SKIPPED = 3, 4


def as_json(context: Context) -> str:
    """Returns a context as text for `from_json`."""
    model = None if context.model is None else str(context.model)
    return json.dumps(
        {
            "device": context.device,
            "num_gpus": context.num_gpus,
            "folder": str(context.folder),
            "engines": context.engines,
            "model": model,
        }
    )


def from_json(text: str) -> Context:
    """Returns the context that `as_json` wrote."""
    said = json.loads(text)
    return Context(
        device=said["device"],
        num_gpus=said["num_gpus"],
        folder=Path(said["folder"]),
        engines={name: tuple(words) for name, words in said["engines"].items()},
        model=None if said["model"] is None else Path(said["model"]),
    )


def main() -> int:
    """Runs the check that the command line names; returns the exit status."""
    atexit.register(gc.freeze)  # As the trainer's processes: no last search for garbage.
    table, name, context, answer = sys.argv[1:]
    check: Check = next(c for c in importlib.import_module(table).CHECKS if c.name == name)
    figures: Figures = {}
    seen, status = "", 0
    try:
        figures = check.run(from_json(context))
    except CheckSkipped as error:
        seen, status = str(error), SKIPPED
    except CheckFailed as error:
        seen, status = str(error), FAILED
    except Exception as error:
        traceback.print_exc()
        status = FAILED
        seen = f"{type(error).__name__}: {error}"
    Path(answer).write_text(json.dumps({"figures": figures, "seen": seen}))
    return status


if __name__ == "__main__":
    sys.exit(main())
