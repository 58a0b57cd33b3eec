"""Alters a small run in many ways, and counts what `treadle verify` finds.

`./pants run tests/e2e/alterations.py -- --number 1000`. A run of two steps with the fake engine is
made, and altered once at a time: a byte of one of its files, or a value of its trajectories or
metrics. In half of the cases whoever does it rewrites checksums and seals as well. What the files
do not give away is computed again (`--replay`), on one rank for all.

It prints a table, and the alterations that nothing found. `--seed S --first N` makes them again.
"""

import argparse
import asyncio
import hashlib
import json
import math
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import pyarrow.parquet as pq

from treadle.policy.client.group import PolicyGroup
from treadle.policy.v1.checkpoint_service_pb2 import LoadRequest, SaveRequest
from treadle.tracing.trajectories import DIRECTORY, write_file
from treadle.trainer.checkpoint.manifest import MANIFEST, write_manifest
from treadle.trainer.checkpoint.run_directory import CHECKPOINTS, CONFIG
from treadle.trainer.config.load import ConfigError, load_config
from treadle.trainer.main import main as treadle
from treadle.trainer.report.metrics import read_metrics
from treadle.trainer.report.seals import SEALS, read_seals, seal, sha256_of
from treadle.trainer.verify import replay
from treadle.trainer.verify.quick import quick_problems, train_file

__all__ = ["ROWS", "main", "make_run", "problems_of", "reseal", "rewrite", "vouched_files"]

Rows = list[dict[str, Any]]
Change = Callable[[Rows, random.Random], None]

_SETTINGS = (
    *("schedule.total_steps=2", "schedule.save_every=1", "schedule.val_every=null"),
    *("schedule.val_before_train=false", "data.prompts_per_step=2", "data.max_val_rows=8"),
    *("rollout.samples_per_prompt=4", "rollout.threads=1", "launch.policy_threads=1"),
    *("rollout.name=fake", "rollout.response_length=32"),
)
_REWARD = """
import zlib


def score(data_source: str, solution_str: str, ground_truth: str) -> float:
    return float(zlib.crc32(solution_str.encode()) % 2)
"""
_METRICS = "metrics.jsonl"


def make_run(folder: Path, kind: str, *settings: str) -> Path:
    """Returns the directory of a run that learns, with a schedule."""
    (folder / "reward.py").write_text(_REWARD)
    run = folder / "run"
    own = (f"run.dir={run}", f"reward.name={folder}/reward.py:score", f"schedule.kind={kind}")
    beside = () if kind == "sync" else ("algorithm.correction.weights=token",)
    of_kind = {"async": ("schedule.max_staleness=1",), "stream": ("schedule.surplus=1",)}
    assert treadle([*_SETTINGS, *own, *beside, *of_kind.get(kind, ()), *settings]) == 0
    return run


def problems_of(run: Path) -> list[str]:
    """Returns what the files of a run give away."""
    try:
        return list(quick_problems(run, load_config([run / CONFIG], []).config))
    except (ConfigError, OSError) as error:
        return [str(error)]


def reseal(run: Path) -> None:
    """Rewrites checksums and seals: what somebody does who alters a file and knows of them."""
    for manifest in (run / CHECKPOINTS).glob(f"*/{MANIFEST}"):
        manifest.unlink()
        write_manifest(manifest.parent)
    lines = (run / _METRICS).read_bytes().splitlines(keepends=True)
    of_lines = {json.loads(line)["step"]: hashlib.sha256(line).hexdigest() for line in lines}
    kept = list(read_seals(run))
    (run / SEALS).unlink()
    for step, name, digest in kept:
        if name == _METRICS:
            seal(run, step, name, of_lines[step])
        else:
            there = (run / name).exists()
            seal(run, step, name, sha256_of(run / name) if there else digest)


def rewrite(run: Path, step: int, change: Callable[[Rows], None]) -> None:
    """Changes rows of the trajectories of a step."""
    rows = pq.read_table(run / train_file(step)).to_pylist()
    change(rows)
    write_file(run / DIRECTORY, step=step, phase="train", rows=rows)


def vouched_files(run: Path) -> list[Path]:
    """Returns the files whose every byte has a seal or a checksum, and the seals."""
    found = [*(run / "trajectories").glob("*"), *(run / CHECKPOINTS).rglob("*/*")]
    found += [run / name for name in (CONFIG, _METRICS, SEALS)]
    return sorted(path for path in found if path.is_file())


def _sample(rows: Rows, draw: random.Random) -> tuple[dict[str, Any], int]:
    """Returns a sample and the place of a token that the model sampled."""
    sample = draw.choice(draw.choice(rows)["samples"])
    sampled = [span for span in sample["spans"] if span["origin"] == "sampled"]
    span = draw.choice(sampled)
    return sample, draw.randrange(span["start"], span["stop"])


def _reward(rows: Rows, draw: random.Random) -> None:
    row = draw.choice(rows)
    row["reward"] = 1.0 - row["reward"]


def _column(name: str, by: float) -> Change:
    def change(rows: Rows, draw: random.Random) -> None:
        while True:  # a trajectory without signal has no values of the policy
            sample, place = _sample(rows, draw)
            if sample[name] and not math.isnan(sample[name][place]):
                break
        sample[name][place] += by

    return change


def _version(rows: Rows, draw: random.Random) -> None:
    sample, _ = _sample(rows, draw)
    span = draw.choice([span for span in sample["spans"] if span["origin"] == "sampled"])
    span["weight_version"] += draw.choice((-1, 1, 7))


def _span(rows: Rows, draw: random.Random) -> None:
    sample, _ = _sample(rows, draw)
    draw.choice(sample["spans"])["stop"] += draw.choice((-1, 1))


def _mask(rows: Rows, draw: random.Random) -> None:
    sample, place = _sample(rows, draw)
    sample["logprobs"][place] = float("nan")


def _id(rows: Rows, draw: random.Random) -> None:
    sample, place = _sample(rows, draw)
    sample["ids"][place] = (sample["ids"][place] + draw.randrange(1, 100)) % 100


def _prompt_id(rows: Rows, draw: random.Random) -> None:
    sample, _ = _sample(rows, draw)
    place = draw.randrange(sample["spans"][0]["stop"])
    sample["ids"][place] = (sample["ids"][place] + draw.randrange(1, 100)) % 100


def _missing(rows: Rows, draw: random.Random) -> None:
    del rows[draw.randrange(len(rows))]


def _twice(rows: Rows, draw: random.Random) -> None:
    first, second = draw.sample(range(len(rows)), 2)
    rows[first] = rows[second]


ROWS: Mapping[str, Change] = MappingProxyType(
    {
        "reward": _reward,
        "advantage": _column("advantages", 0.25),
        "weight version": _version,
        "span": _span,
        "mask": _mask,
        "id": _id,
        "id of a prompt": _prompt_id,
        "log-probability of the engine": _column("logprobs", -0.5),
        "log-probability of the policy": _column("policy_logprobs", -0.5),
        "entropy": _column("entropy", 0.5),
        "row left out": _missing,
        "row twice": _twice,
    }
)
_BYTE, _METRIC = "byte", "metric"
_KINDS = (*ROWS, _METRIC, *[_BYTE] * 4)


def _alter(run: Path, kind: str, draw: random.Random, *, rewritten: bool) -> str:
    """Alters a run; returns where."""
    if kind == _BYTE:
        # Whoever rewrites the others writes them anew.
        of_others = (SEALS, MANIFEST) if rewritten else ()
        path = draw.choice([path for path in vouched_files(run) if path.name not in of_others])
        content = bytearray(path.read_bytes())
        place = draw.randrange(len(content))
        content[place] ^= draw.randrange(1, 256)
        path.write_bytes(content)
        return f"byte {place} of {path.relative_to(run)}"
    if kind == _METRIC:
        path = run / _METRICS
        records = [json.loads(line) for line in path.read_text().splitlines()]
        record = draw.choice(records)
        name = draw.choice([name for name, value in record.items() if name != "step"])
        record[name] = (record[name] or 0.0) * 1.5 + 0.125
        path.write_text("".join(json.dumps(each) + "\n" for each in records))
        return f"{name} of step {record['step']}"
    step = draw.randint(1, 2)
    rewrite(run, step, lambda rows: ROWS[kind](rows, draw))
    return f"of step {step}"


@asynccontextmanager
async def _one_policy(run: Path) -> AsyncIterator[Callable[..., Any]]:
    """Yields what stands for `replay._policy`: the rank of a run, each time as it began."""
    config, start = load_config([run / CONFIG], []).config, replay._policy
    with tempfile.TemporaryDirectory() as folder:
        begin, logs = str(Path(folder) / "begin"), Path(folder) / "logs"
        async with AsyncExitStack() as stack:
            group = await stack.enter_async_context(start(config, logs))
            await group.call(SaveRequest(directory=begin))

            @asynccontextmanager
            async def policy(*_: object) -> AsyncIterator[PolicyGroup]:
                nonlocal group
                try:
                    await group.call(LoadRequest(directory=begin))
                except Exception:  # what was altered before ended the rank
                    await stack.aclose()
                    group = await stack.enter_async_context(start(config, logs))
                    await group.call(LoadRequest(directory=begin))
                yield group

            yield policy


async def _replayed(run: Path) -> list[str]:
    """Returns what the first step that does not fit gives away; none if all fit."""
    config = load_config([run / CONFIG], []).config
    metrics = {int(each["step"]): each for each in read_metrics(run / _METRICS)}
    try:
        async with aclosing(replay.replay_problems(run, config, metrics)) as found:
            async for _, problems in found:
                if problems:
                    return problems
    except Exception as error:  # whatever ends the command is found
        return [repr(error)]
    return []


async def _alter_often(run: Path, seed: int, numbers: Sequence[int]) -> None:
    counts: Counter[tuple[str, str, str]] = Counter()
    copy = run.with_name("altered")
    async with _one_policy(run) as policy:
        with mock.patch.object(replay, "_policy", policy):
            assert not problems_of(run) and not await _replayed(run)
            for number in numbers:
                draw = random.Random(f"{seed}/{number}")
                kind, sealed = draw.choice(_KINDS), draw.choice(("kept", "rewritten"))
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(run, copy)
                where = _alter(copy, kind, draw, rewritten=sealed == "rewritten")
                found = "nothing"
                if sealed == "rewritten":
                    try:
                        reseal(copy)
                    except (KeyError, ValueError):  # the seals or the lines are damaged
                        found = "its files"
                if found == "nothing" and problems_of(copy):
                    found = "its files"
                elif found == "nothing" and await _replayed(copy):
                    found = "the replay"
                counts[kind, sealed, found] += 1
                if found == "nothing":
                    _say(f"{number}: not found: {kind}, {where}, seals {sealed}")
    for kind in dict.fromkeys(_KINDS):
        for sealed in ("kept", "rewritten"):
            of = [counts[kind, sealed, f] for f in ("its files", "the replay", "nothing")]
            _say("| " + " | ".join([kind, sealed, str(sum(of)), *map(str, of)]) + " |")
    of = [sum(n for key, n in counts.items() if key[2] == f) for f in ("its files", "the replay")]
    _say(f"{len(numbers)} alterations: {of[0]} found by the files, {of[1]} more by the replay")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(argv: Sequence[str]) -> int:
    """Alters a run as often as was asked for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="alterations", description=__doc__)
    parser.add_argument("--number", type=int, default=1000, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="begin with this one")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder), "async")
        numbers = range(args.first, args.first + args.number)
        asyncio.run(_alter_often(run, args.seed, numbers))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
