"""`treadle export RUN OUT`: a checkpoint of a run -> a Hugging Face model directory.

With `--adapter` the directory holds the run's LoRA adapter alone, as PEFT loads it. A checkpoint
that holds the model as a Hugging Face directory is copied. Any other is read by one policy rank,
whatever its parallel sizes were, and written from there.
"""

import argparse
import asyncio
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.trainer.cli.console import fail, say

if TYPE_CHECKING:
    from treadle.trainer.checkpoint.run_directory import Checkpoint
    from treadle.trainer.config.sft import AnyConfig

__all__ = ["main"]


class ExportError(RuntimeError):
    """The model cannot be exported; the message names the cause, the value and the fix."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="treadle export",
        description="Writes the model of a run as a Hugging Face directory, which transformers, "
        "vLLM, SGLang and treadle-rollout-server load: the weights bit for bit as trained, and the "
        "tokenizer and chat template of the model that training started from.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("out", type=Path, metavar="OUT", help="where to write; must not exist")
    parser.add_argument(
        "--step", type=int, help="of which checkpoint; the latest one if left out", metavar="N"
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write only the LoRA adapter, in PEFT's format",
    )
    parser.add_argument(
        "--push-to-hub",
        metavar="ORG/NAME",
        help="upload OUT to this repository on the Hugging Face Hub, made (private) if missing; "
        "needs HF_TOKEN or `hf auth login`",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    from treadle.agent_loop import SetupError
    from treadle.policy.client.group import PolicyError
    from treadle.trainer.checkpoint.run_directory import RunDirectoryError
    from treadle.trainer.config.load import ConfigError
    from treadle.trainer.hub import check_repository, push_model
    from treadle.trainer.launch.process import ProcessError

    args = _parser().parse_args(argv)
    try:
        _check_place(args.out)
        if args.push_to_hub is not None:
            check_repository(args.push_to_hub)
        config, checkpoint = _checkpoint(args.run, args.step)
        if args.adapter and not config.policy.lora.rank:
            raise ExportError(
                f"{args.run} has no adapter: policy.lora.rank is 0, so all weights were trained; "
                "leave out --adapter"
            )
        _write(config, checkpoint, args.out, adapter=args.adapter)
        _add_model_card(args.out, config, checkpoint, name=args.push_to_hub, adapter=args.adapter)
        size = sum(file.stat().st_size for file in args.out.rglob("*") if file.is_file())
        what = "adapter" if args.adapter else "model"
        say(f"wrote the {what} of step {checkpoint.step} to {args.out} ({size / 1e6:,.1f} MB)")
        if args.push_to_hub is not None:
            say(f"pushed it to {push_model(args.out, args.push_to_hub)}")
    except (ConfigError, ExportError, RunDirectoryError, SetupError) as error:
        return fail(error)
    except (PolicyError, ProcessError) as error:
        return fail(error, status=1)
    except OSError as error:
        return fail(ExportError(f"cannot write {args.out}: {error.strerror or error}"), status=1)
    if not args.adapter:
        say(f"serve it:  treadle-rollout-server --engine torch --model.path {args.out}")
    return 0


def _check_place(out: Path) -> None:
    if out.exists():
        raise ExportError(f"{out} exists: choose another place, or remove it")


def _checkpoint(run: Path, step: int | None) -> "tuple[AnyConfig, Checkpoint]":
    """Returns the configuration of a run and the wanted checkpoint."""
    from treadle.trainer.checkpoint.run_directory import CHECKPOINTS, CONFIG, Checkpoints
    from treadle.trainer.config.load import load_run_config

    if not any((run / name).exists() for name in ("metrics.jsonl", CHECKPOINTS)):
        raise ExportError(
            f"{run} is not a run directory: it has no {CHECKPOINTS} and metrics.jsonl of a run"
        )
    checkpoints = Checkpoints(run / CHECKPOINTS, keep=1)
    checkpoint = checkpoints.chosen() if step is None else checkpoints.at(step)
    if checkpoint is None:
        raise ExportError(
            f"{run} holds no checkpoint: none was reached yet, or schedule.save_last=false and "
            "schedule.save_every=null kept none"
        )
    config = load_run_config(checkpoint.config_file or run / CONFIG)
    return config, checkpoint


def _write(config: "AnyConfig", checkpoint: "Checkpoint", out: Path, *, adapter: bool) -> None:
    from treadle.policy.client.hf_files import ADAPTER, MODEL_FILES, WEIGHT_FILES, copy_files
    from treadle.trainer.model_source import convert

    out.parent.mkdir(parents=True, exist_ok=True)
    building = out.with_name(f".{out.name}.writing")
    shutil.rmtree(building, ignore_errors=True)
    try:
        if checkpoint.hf_directory is not None:
            if adapter:
                copy_files(checkpoint.hf_directory / ADAPTER, building, ("*",))
            else:
                files = (*MODEL_FILES, *WEIGHT_FILES, f"{ADAPTER}/*")
                copy_files(checkpoint.hf_directory, building, files)
        else:
            asyncio.run(convert(config, checkpoint, building.absolute(), adapter=adapter))
        building.rename(out)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _add_model_card(
    out: Path,
    config: "AnyConfig",
    checkpoint: "Checkpoint",
    *,
    name: str | None,
    adapter: bool,
) -> None:
    """Writes README.md, which the Hub shows, over that of the model that training started from."""
    shown = {
        key: value
        for key, value in checkpoint.metrics.items()
        if key.startswith(("val/", "reward/mean", "train/loss"))
    }
    method = "sft" if config.schedule.kind == "sft" else "grpo"
    lora = ["lora"] if config.policy.lora.rank else []
    head: Mapping[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "tags": ["treadle", method, *lora],
    }
    lines = [
        "---",
        json.dumps(head),  # JSON is YAML
        "---",
        f"# {name or config.run.name}",
        "",
        f"Trained by Treadle from `{config.model.path.name}`: run `{config.run.name}`, step "
        f"{checkpoint.step}, in {config.policy.dtype}.",
        *(["", "| metric | value |", "|---|---|"] if shown else []),
        *(f"| `{key}` | {value:.4g} |" for key, value in sorted(shown.items())),
        "",
    ]
    partial = out / ".README.md.partial"
    partial.write_text("\n".join(lines), encoding="utf-8")
    os.replace(partial, out / "README.md")
