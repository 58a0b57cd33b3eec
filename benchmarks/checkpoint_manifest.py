"""What a checkpoint's manifest costs: when it is written, and before a resume.

`write` is what a checkpoint cost without one: files of random bytes, flushed to the disk as those
of the policy are. `manifest` reads them again for their sizes and checksums; `compare` is what a
resume does before it reads them, `sizes` the same without their contents. All in turns, in a new
directory each round, with the pages still in memory.

    python benchmarks/checkpoint_manifest.py [--megabytes 1024] [--files 4] [--rounds 5]
        [--directory DIRECTORY] [--json FILE]
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from treadle.trainer.checkpoint.manifest import write_manifest
from treadle.trainer.checkpoint.run_directory import POLICY, Checkpoints

_CHUNK = 1 << 20


def write_files(directory: Path, *, files: int, megabytes: int) -> None:
    """Writes `megabytes` in all."""
    chunk = os.urandom(_CHUNK)
    (directory / POLICY).mkdir()
    for number in range(files):
        with (directory / POLICY / f"__{number}_0.distcp").open("wb") as file:
            for _ in range(megabytes * 1_000_000 // files // _CHUNK):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())


def timed(work: Callable[[], object]) -> dict[str, float]:
    """Returns the wall and the processor seconds of a call."""
    began, used = time.perf_counter(), time.process_time()
    work()
    return {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - used}


def one_round(directory: Path, *, files: int, megabytes: int) -> dict[str, dict[str, float]]:
    """Returns the times of each part, in a checkpoint of a new run directory."""
    checkpoints = Checkpoints(directory / "checkpoints", keep=1)
    found: dict[str, dict[str, float]] = {}

    async def write(partial: Path) -> None:
        found["write"] = timed(lambda: write_files(partial, files=files, megabytes=megabytes))

    asyncio.run(checkpoints.save(1, {}, write))
    found["manifest"] = timed(lambda: write_manifest(directory / "checkpoints" / "step-00000001"))
    found["compare"] = timed(checkpoints.newest_whole)
    found["sizes"] = timed(lambda: checkpoints.newest_whole(contents=False))
    return found


def main() -> None:
    """Prints one line per part."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="on the disk to measure")
    parser.add_argument("--json", type=Path, help="also write the rounds here")
    arguments = parser.parse_args()
    rounds = []
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            rounds.append(
                one_round(Path(directory), files=arguments.files, megabytes=arguments.megabytes)
            )
    for part in rounds[0]:
        for unit in ("seconds", "cpu_seconds"):
            values = [found[part][unit] for found in rounds]
            share = [found[part][unit] / found["write"][unit] for found in rounds]
            print(
                f"{part}: {statistics.median(values):.3f} {unit} "
                f"({min(values):.3f} to {max(values):.3f}), {statistics.median(share):.3f} of "
                f"the write's ({min(share):.3f} to {max(share):.3f})"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rounds, indent=2))


if __name__ == "__main__":
    main()
