"""Records the arguments of verl's own scripts: `record_verl_scripts.py CHECKOUT VERSION`.

Every `*.sh` below the checkout that calls `verl.trainer.main_ppo` is run by bash without programs:
stand-ins for `python3` and its like write their arguments, and any other command does nothing. The
record has the arguments of each call, by the script's path; no text of a script is kept.

    git clone --branch v0.7.0 --depth 1 https://github.com/volcengine/verl
    python build-support/record_verl_scripts.py verl 0.7.0
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path("tests/seeds/verl_scripts")
PROGRAM = "verl.trainer.main_ppo"
# Arguments end with a zero byte, and calls with an empty line in place of an argument.
_PYTHON = f"""#!/bin/bash
while (($#)) && [[ $1 != {PROGRAM} ]]; do shift; done
(($#)) && printf '%s\\0' "${{@:2}}" $'\\n' >> "$RECORD"
exit 0
"""
# A command that fails ends no script.
_BEFORE = """
command_not_found_handle() { return 0; }
set() { return 0; }
export -f command_not_found_handle set
"""
# Variables that the scripts expect of a cluster.
_NODES = ("NNODES", "WORLD_SIZE", "ARNOLD_WORKER_NUM", "SLURM_JOB_NUM_NODES")
_SETTINGS = {
    **{"HOME": "/home/user", "USER": "user", "RANK": "0", "ARNOLD_WORKER_GPU": "8"},
    **dict.fromkeys(_NODES, "1"),
}


def calls(script: str) -> list[list[str]]:
    """Returns the arguments of each call of verl's program in a script."""
    with tempfile.TemporaryDirectory() as folder:
        programs, record = Path(folder, "bin"), Path(folder, "record")
        programs.mkdir()
        for name in ("python", "python3", "ray", "torchrun"):
            (programs / name).write_text(_PYTHON)
            (programs / name).chmod(0o755)
        # It reads to the end, or bash may end before what is piped into it.
        (programs / "tee").write_text("#!/bin/bash\nwhile read -r; do :; done\n")
        (programs / "tee").chmod(0o755)
        for name in ("basename", "date", "dirname"):
            (programs / name).symlink_to(Path("/usr/bin") / name)
        subprocess.run(
            ["/bin/bash", "-c", _BEFORE + script],
            env={**_SETTINGS, "PATH": str(programs), "RECORD": str(record)},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            check=False,
        )
        # The working directory becomes ".", so that the record is the same on every machine.
        written = record.read_text().replace(folder, ".") if record.exists() else ""
    return [call.split("\0")[:-1] for call in written.split("\n\0")[:-1]]


def record(checkout: Path) -> dict[str, list[list[str]]]:
    """Returns the calls of each script of a checkout, by its path."""
    recorded = {}
    for path in sorted(checkout.rglob("*.sh")):
        script = path.read_text(encoding="utf-8", errors="replace")
        if PROGRAM in script and (found := calls(script)):
            recorded[str(path.relative_to(checkout))] = found
    return recorded


if __name__ == "__main__":
    content = json.dumps(record(Path(sys.argv[1])), separators=(",", ":")).encode()
    (FOLDER / f"{sys.argv[2]}.json.gz").write_bytes(gzip.compress(content, mtime=0))
