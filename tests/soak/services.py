"""The servers that stand beside the runs of a soak, and get bad requests all the time."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from soak.bad_requests import Target

from treadle.rollout_server.testing.process import ServerProcess
from treadle.tools.sandbox.testing import why_no_user_namespaces
from treadle.trainer.demo import DEMO
from treadle.trainer.launch.process import child_python_path

_MODEL = DEMO.parent / "model"
_START_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A server that stands beside the runs.

    Attributes:
        pid: Of its process.
        target: Where it takes bad requests; None: it gets them through another.
    """

    pid: int
    target: Target | None


@contextmanager
def services(log: Path, environment: Mapping[str, str]) -> Iterator[Mapping[str, Service]]:
    """Starts a proxy over a fake engine, and a sandbox where the kernel allows one.

    Args:
        log: Gets what the two print.
        environment: Variables beside those of this process.
    """
    with ExitStack() as stack:
        output = stack.enter_context(log.open("ab"))
        engine = stack.enter_context(
            ServerProcess(
                "--engine", "fake", "--model.path", str(_MODEL), "--address", "127.0.0.1:0"
            )
        )
        engine.wait_ready()

        def start(*command: str) -> "subprocess.Popen[str]":
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env={**os.environ, "PYTHONPATH": child_python_path(), **environment},
            )
            stack.callback(_end, process)
            return process

        proxy = start(
            *("treadle.agent_loop.proxy", "--replicas", engine.address, "--tokenizer", str(_MODEL)),
            *("--port", "0", "--max-response-tokens", "200", "--max-tokens", "16"),
        )
        assert proxy.stdout is not None
        if not select.select([proxy.stdout], [], [], _START_S)[0] or proxy.poll() is not None:
            said = log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"the proxy did not start; it said:\n{said}")
        said = json.loads(proxy.stdout.readline())
        address = said["address"].removeprefix("http://")
        started = {
            "engine of the proxy": Service(pid=engine.popen.pid, target=None),
            "proxy": Service(pid=proxy.pid, target=Target(address=address, secret=said["key"])),
        }
        if why_no_user_namespaces() is None:
            ready = log.with_name("sandbox.ready")
            sandbox = start(
                *("treadle.tools.sandbox", "--port", "0", "--places", "2"),
                *("--packages", "", "--ready_file", str(ready)),
            )
            end = time.monotonic() + _START_S
            while not ready.exists():
                if sandbox.poll() is not None or time.monotonic() > end:
                    said = log.read_text(errors="replace")[-3000:]
                    raise RuntimeError(f"the sandbox server did not start; it said:\n{said}")
                time.sleep(0.05)
            address = json.loads(ready.read_text())["url"].removeprefix("http://")
            started["sandbox"] = Service(pid=sandbox.pid, target=Target(address=address))
        yield started


def _end(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(_START_S)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
