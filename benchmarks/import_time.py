"""What importing each package costs, as a ratio to importing grpc alone.

    ./pants run benchmarks/import_time.py [-- --repeat 15]

Each import runs in a separate interpreter, and the subjects take turns, so that a machine that
is busy for a while slows all of them.  The first round warms the file cache and is not counted. The
time is that of the import statement as the child measures it, without the interpreter's start.
"""

import argparse
import os
import statistics
import subprocess
import sys

BASE = "grpc"
SUBJECTS = (
    BASE,
    "treadle.tracing",
    "treadle.agent_loop",
    "treadle.agent_loop.rpc",
    "treadle.tools",
    "treadle.rollout_server",
    "treadle.trainer.main",
)
CHILD = """
import sys, time
start = time.perf_counter()
__import__(sys.argv[1])
print(time.perf_counter() - start)
"""


def import_s(module: str) -> float:
    """Returns how long one fresh interpreter takes to import a module, in seconds."""
    search_path = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    child = subprocess.run(
        [sys.executable, "-c", CHILD, module],
        env={**os.environ, "PYTHONPATH": search_path},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(child.stdout)


def main() -> None:
    """Measures, and prints one line per subject."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=15, help="counted rounds")
    repeat = parser.parse_args().repeat
    rounds = [{module: import_s(module) for module in SUBJECTS} for _ in range(repeat + 1)][1:]
    base = statistics.median(times[BASE] for times in rounds)
    print(f"{'module':24} {'median':>8} {'min':>8} {'max':>8}  {'of grpc':>8}  above grpc")
    for module in SUBJECTS:
        times = [r[module] for r in rounds]
        median = statistics.median(times)
        print(
            f"{module:24} {median:7.3f}s {min(times):7.3f}s {max(times):7.3f}s"
            f"  {median / base:7.2f}x  {median - base:+.3f}s"
        )


if __name__ == "__main__":
    main()
