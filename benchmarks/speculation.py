"""Drafts of the torch engine: that they change nothing, and what they save.

Whole runs of the calculator demo: driver, policy rank, loop with its tool, gRPC and weight updates
are real. A round is one run without and one with drafts, from the same seed, each with a rollout
server of its own; the weights of the second run come of its own training. All ids and
log-probabilities of all completions, and all sampled rewards, are compared::

    python benchmarks/speculation.py [--rounds 3] [--steps 40] [--drafts 8] [--threads 1]

Without drafts the server has `model.batch_invariant` too, so that all bits can be compared; with
`--no-exact` it has the faster kernels of a server with neither, and last bits differ.

CPU time is that of the server's process from the first request to the last, everything included:
model, sampler, gRPC, weight updates. Tokens per pass are sampled tokens over passes, each counted
once per sequence that it sampled for. The figures are the median and range over the rounds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from treadle.rollout_server.testing.process import running_server
from treadle.trainer.demo import MODELS

_COUNTERS = {
    "cpu_s": "process_cpu_seconds_total",
    "tokens": "treadle_sampled_tokens_total",
    "passes": "treadle_sampling_passes_total",
    "drafted": "treadle_drafted_tokens_total",
    "accepted": "treadle_accepted_draft_tokens_total",
}


@dataclass(frozen=True)
class Measured:
    """One run.

    Attributes:
        counts: What the server counted during the run, by the names in `_COUNTERS`.
        sampled: Ids and log-probabilities of each trajectory, as they are in its files, by step,
            phase, task and number.
        rewards: Mean sampled reward of each step.
        completions: Number of completions of all trajectories.
    """

    counts: dict[str, float]
    sampled: dict[tuple[str, str, int], list[tuple[str, str]]]
    rewards: list[float]
    completions: int

    @property
    def tokens_per_pass(self) -> float:
        """Sampled tokens over passes."""
        return self.counts["tokens"] / self.counts["passes"]

    @property
    def tokens_per_cpu_s(self) -> float:
        """Sampled tokens per second of the server's CPU time."""
        return self.counts["tokens"] / self.counts["cpu_s"]


def scrape(url: str) -> dict[str, float]:
    """Reads the server's counters."""
    with urllib.request.urlopen(url) as answer:
        lines = answer.read().decode().splitlines()
    values = dict(line.split(" ")[:2] for line in lines if not line.startswith("#"))
    return {name: float(values[metric]) for name, metric in _COUNTERS.items()}


def run(drafts: int, args: argparse.Namespace, seed: int) -> Measured:
    """Trains the demo on a server with drafts of this length."""
    settings = {
        "engine": "torch",
        "model.path": str(MODELS["demo:calculator"]),
        "model.device": "cpu",
        "model.num_threads": str(args.threads),
        "model.max_num_seqs": str(args.sequences),
        "model.max_draft_tokens": str(drafts),
        "model.batch_invariant": "true" if args.exact else "false",
        "metrics_address": "127.0.0.1:0",
    }
    options = (part for key, value in settings.items() for part in (f"--{key}", value))
    with tempfile.TemporaryDirectory() as name, running_server(*options) as server:
        url = next(word for word in server.output.split() if word.endswith("/metrics"))
        before = scrape(url)
        run_dir = Path(name) / "run"
        arguments = (
            f"run.dir={run_dir}",
            f"run.seed={seed}",
            f"rollout.addresses=[{server.address}]",
            f"rollout.max_in_flight={args.sequences}",
            f"schedule.total_steps={args.steps}",
            "schedule.save_every=null",
        )
        done = subprocess.run(
            [sys.executable, "-m", "treadle.trainer.main", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
        counts = {key: value - before[key] for key, value in scrape(url).items()}
        return read(run_dir, counts)


def read(run_dir: Path, counts: dict[str, float]) -> Measured:
    """Reads what a finished run sampled."""
    sampled = {}
    completions = 0
    for file in sorted((run_dir / "trajectories").glob("*.parquet")):
        columns = ["task_id", "rollout_index", "samples"]
        for row in pq.read_table(file, columns=columns).to_pylist():
            samples = row["samples"]
            key = (file.stem, row["task_id"], row["rollout_index"])
            sampled[key] = [(str(s["ids"]), str(s["logprobs"])) for s in samples]
            completions += sum(x["origin"] == "sampled" for s in samples for x in s["spans"])
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    return Measured(counts, sampled, rewards, completions)


def differing(plain: Measured, drafted: Measured) -> dict[str, int]:
    """Counts what differs between two runs, in trajectories and steps."""
    if plain.sampled.keys() != drafted.sampled.keys():
        raise SystemExit("the runs do not have the same trajectories")
    pairs = [(plain.sampled[key], drafted.sampled[key]) for key in plain.sampled]
    rewards = zip(plain.rewards, drafted.rewards, strict=True)
    return {
        "completions": drafted.completions,
        "trajectories": len(pairs),
        "with_other_ids": sum([x for x, _ in a] != [x for x, _ in b] for a, b in pairs),
        "with_other_logprobs": sum(a != b for a, b in pairs),
        "steps_with_other_rewards": sum(a != b for a, b in rewards),
    }


def spread(values: Sequence[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Runs the rounds and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--exact", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    found: list[tuple[Measured, Measured]] = []
    for seed in range(args.rounds):
        # The side that comes first alternates, so that a slower machine favours neither.
        sides = {drafts: run(drafts, args, seed) for drafts in (0, args.drafts)[:: (-1) ** seed]}
        plain, drafted = sides[0], sides[args.drafts]
        found.append((plain, drafted))
        print(json.dumps({"seed": seed, **differing(plain, drafted)}), flush=True)
        for side in (plain, drafted):
            print(json.dumps({key: round(value, 2) for key, value in side.counts.items()}))
    drafted_runs = [drafted for _, drafted in found]
    print(f"tokens per pass {spread([one.tokens_per_pass for one in drafted_runs])}")
    accepted = [one.counts["accepted"] / one.counts["drafted"] for one in drafted_runs]
    print(f"accepted share of drafted tokens {spread(accepted)}")
    rates = [(a.tokens_per_cpu_s, b.tokens_per_cpu_s) for a, b in found]
    print(f"tokens per CPU second, without drafts {spread([a for a, _ in rates])}")
    print(f"tokens per CPU second, with drafts {spread([b for _, b in rates])}")
    print(f"ratio per round {spread([b / a for a, b in rates])}")


if __name__ == "__main__":
    main()
