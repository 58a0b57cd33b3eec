"""A GRPO step of the calculator demo against TRL's GRPOTrainer, step by step in turn.

Both train the same model from the same weights on the same rows in the same order, with the same
prompt token for token, calculator, reward, number of samples, limits of length, optimizer, and
float32. A trajectory may call the tool once. Treadle's driver, policy and server sleep while TRL
takes a step, and TRL sleeps while they take theirs; a step is timed from its begin to the begin of
the next, so that rewards, weight sync and logging are part of it. Ratios are taken within each
round. Wall time is what a user waits; processor time, of all processes of a side, changes least
with what else the machine does.

TRL gets a separate environment, below `--environment`, which is made where it is missing::

    python benchmarks/against_trl.py [--steps 12] [--runs 3] [--peer padded continuous]
        [--threads 1] [--json results.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from peer_process import PeerProcess, python_of

from treadle.rollout_server.testing.descendants import descendants
from treadle.trainer import load_config, train
from treadle.trainer.config.schema import Config
from treadle.trainer.demo import DEMO

_REQUIREMENTS = ("trl==1.16.*", "torch==2.13.0", "transformers==5.23.0")
_TICKS = os.sysconf("SC_CLK_TCK")

PEERS: Mapping[str, Mapping[str, Any]] = {
    "padded": {},
    "continuous": {
        "use_transformers_continuous_batching": True,
    },
}
"""How TRL samples: `generate` of transformers on a padded batch, or with continuous batching."""


def settings(config: Config, peer: str, threads: int, steps: int) -> dict[str, Any]:
    """Returns what `trl_subject` needs to take the steps that the configuration describes."""
    optimizer, rollout = config.policy.optimizer, config.rollout
    batch = config.data.prompts_per_step * rollout.samples_per_prompt
    assert config.agent.tool_catalogue is not None
    catalogue = yaml.safe_load(config.agent.tool_catalogue.read_text(encoding="utf-8"))
    return {
        "model": str(config.model.path),
        "rows": str(config.data.train_files[0]),
        "tool_schema": catalogue["tools"][0]["tool_schema"],
        "threads": threads,
        "grpo": {
            "max_steps": steps,
            "per_device_train_batch_size": batch,
            "num_generations": rollout.samples_per_prompt,
            "max_completion_length": rollout.response_length,
            "max_tool_calling_iterations": 1,
            "shuffle_dataset": False,
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": 0,
            "beta": 0.0,
            "epsilon": config.algorithm.clip_low,
            "learning_rate": optimizer.lr,
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": optimizer.warmup_steps,
            "weight_decay": optimizer.weight_decay,
            "adam_beta1": optimizer.beta1,
            "adam_beta2": optimizer.beta2,
            "max_grad_norm": optimizer.grad_clip,
            "gradient_checkpointing": False,
            "bf16": False,
            "model_init_kwargs": {"dtype": "float32"},
            "use_cpu": True,
            "seed": config.run.seed,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            **PEERS[peer],
        },
    }


def cpu_seconds(without: int) -> float:
    """Returns the processor time of this process and its descendants but one."""
    ticks = 0
    for pid in {os.getpid(), *descendants(os.getpid())} - {without, *descendants(without)}:
        with suppress(FileNotFoundError, ProcessLookupError):
            # Fields 14 and 15 of proc(5), counted from the one after the name.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS


class Turns:
    """Lets TRL take a step after each of ours, and keeps both.

    Args:
        python: TRL's interpreter.
        what: Its settings.
        log: Where its output goes.
    """

    def __init__(self, python: Path, what: Mapping[str, Any], log: Path) -> None:
        self.rounds: list[dict[str, dict[str, float]]] = []
        self._python, self._what, self._log = python, what, log
        self._peer: PeerProcess | None = None
        self._began: tuple[float, float] | None = None

    async def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called by the trainer between two steps."""
        if self._peer is None:
            self._peer = await PeerProcess.start(
                "TRL",
                self._python,
                "trl_subject.py",
                self._what,
                self._log,
                threads=self._what["threads"],
            )
        pid = self._peer.pid
        if self._began is not None:
            now = time.perf_counter(), cpu_seconds(pid)
            ours = {
                "wall_s": now[0] - self._began[0],
                "cpu_s": now[1] - self._began[1],
                "reward": metrics["reward/mean"],
                "sampled_tokens": metrics["tokens/sampled"] / metrics["rollout/num_trajectories"],
                **{key: value for key, value in metrics.items() if key.startswith("time/")},
            }
            theirs = await self._peer.ask("step")
            self.rounds.append({"treadle": ours, "trl": theirs})
        else:
            await self._peer.ask("step")  # each side's first step warms it up
        self._began = time.perf_counter(), cpu_seconds(pid)

    def close(self) -> None:
        """Ends TRL, which must not outlive the run; its event loop is gone by now."""
        if self._peer is not None:
            self._peer.kill()


def measure(python: Path, peer: str, threads: int, steps: int, seed: int) -> list[dict[str, Any]]:
    """Trains both sides for one step more, their first, and returns the other steps' figures."""
    with tempfile.TemporaryDirectory() as directory:
        config = load_config(
            [DEMO],
            [
                *(
                    f"run.dir={directory}/run",
                    f"run.seed={seed}",
                    f"schedule.total_steps={steps + 1}",
                ),
                *("data.val_files=[]", "data.shuffle=false", "schedule.val_every=null"),
                *("schedule.save_every=null", "schedule.save_last=false", "schedule.save_hf=never"),
                f"rollout.threads={threads}",
            ],
        ).config
        turns = Turns(
            python, settings(config, peer, threads, steps + 2), Path(directory, "trl.log")
        )
        try:
            train(config, on_step=turns.on_step)
        finally:
            turns.close()
    return turns.rounds


def report(peer: str, rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> None:
    """Prints one line per clock: medians, and the ratio within each round with its range."""
    for clock in ("wall_s", "cpu_s"):
        sides = {side: [r[side][clock] for r in rounds] for side in ("treadle", "trl")}
        ratios = sorted(t / o for t, o in zip(sides["trl"], sides["treadle"], strict=True))
        print(
            f"{peer:12s} {clock:7s} TRL {statistics.median(sides['trl']):.3f}, "
            f"Treadle {statistics.median(sides['treadle']):.3f}, "
            f"x{statistics.median(ratios):.2f} [{ratios[0]:.2f} .. {ratios[-1]:.2f}]"
        )
    for figure in ("reward", "sampled_tokens"):
        means = (statistics.mean(r[side][figure] for r in rounds) for side in ("trl", "treadle"))
        print(f"{'':12s} mean {figure}: TRL {next(means):.2f}, Treadle {next(means):.2f}")


def main() -> None:
    """Prints the ratios for each way in which TRL samples."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--environment",
        type=Path,
        default=Path.home() / ".cache" / "treadle" / "trl-1.16",
        help="TRL's virtual environment",
    )
    parser.add_argument("--peer", nargs="+", choices=PEERS, default=["padded"])
    parser.add_argument("--steps", type=int, default=12, help="per run")
    parser.add_argument("--runs", type=int, default=3, help="each with another seed")
    parser.add_argument("--threads", type=int, default=1, help="of TRL, and of the torch engine")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    python = python_of(arguments.environment, _REQUIREMENTS)
    found: dict[str, list[dict[str, Any]]] = {peer: [] for peer in arguments.peer}
    for seed in range(arguments.runs):
        for peer in arguments.peer:
            found[peer] += measure(python, peer, arguments.threads, arguments.steps, seed)
    print(f"{arguments.steps} steps x {arguments.runs}, load {os.getloadavg()[0]:.1f}")
    for peer, rounds in found.items():
        report(peer, rounds)
    if arguments.json:
        arguments.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
