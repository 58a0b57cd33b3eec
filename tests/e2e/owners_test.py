"""A driver that is killed leaves no process behind, of whatever kind, and however it detached."""

import os
import select
import subprocess
import sys
import time
from pathlib import Path

from treadle.tracing.child_process import child_python_path

_LONG_S = 120.0

# Each names itself and what it detached in files; the second is of another session, the third
# has lost its parents.
_PROGRAM = """
echo > {pids}/{kind}-program.$$
setsid sh -c 'echo > {pids}/{kind}-session.$$; exec sleep 1000' &
sh -c '(setsid sh -c "echo > {pids}/{kind}-fork.\\$\\$; exec sleep 1000" &)'
trap '' TERM HUP INT
while :; do sleep 1000; done
"""
# It holds the interpreter's lock.
_OWN = """
import os
def hold(program):
    name, *detach = program.strip().splitlines()[:3]
    open(name.split()[-1].replace("$$", str(os.getpid())), "w").close()
    os.system("\\n".join(detach))
    return 10 ** 10 ** 8
"""
_OWNER = f"""
import asyncio, sys
from functools import partial
from pathlib import Path
from treadle.agent_loop import AgentTask, Message, load_import_path
from treadle.agent_loop.proxy import CommandAgent
from treadle.agent_loop.proxy.agent import AgentSession
from treadle.agent_loop.time_limited import TimeLimited
from treadle.tools.environments.server_process import ServerProcess
from treadle.tools.mcp.servers import ServerConfig
from treadle.trainer.launch.local import LocalLauncher
from treadle.trainer.launch.process import ProcessSpec

PIDS = Path(sys.argv[1])
PROGRAM = {_PROGRAM!r}

def command(kind):
    return ("sh", "-c", PROGRAM.format(pids=PIDS, kind=kind))

async def launched():
    async with LocalLauncher(PIDS / "logs") as launcher:
        spec = ProcessSpec(name="server", module="", command=command("launched"))
        await (await launcher.start(spec)).wait()

async def mcp_server():
    program, *arguments = command("mcp")
    async with ServerConfig(command=program, args=tuple(arguments)).connect():
        pass

async def main():
    message = Message(role="user", content="?")
    task = AgentTask(task_id="t", sample_index=0, rollout_index=0, loop="x", messages=(message,))
    url = "http://127.0.0.1:1"
    session = AgentSession(task=task, base_url=url, api_key="k", reward_url=url)
    hold = TimeLimited(
        partial(load_own, str(PIDS.parent / "own.py:hold")), name="reward", processes=1
    )
    await asyncio.gather(
        launched(),
        mcp_server(),
        CommandAgent(command("agent"))(session),
        ServerProcess(command("environment"), url).started(),
        hold(command("reward")[2]),
        return_exceptions=True,
    )

from own_loader import load_own
asyncio.run(main())
"""
_LOADER = """
from treadle.agent_loop import load_import_path
def load_own(reference):
    return load_import_path(reference, "reward")
"""
_KINDS = ("launched", "mcp", "agent", "environment", "reward")


def _named(pids: Path) -> list[int]:
    """Waits until every kind has named its three processes."""
    until = time.monotonic() + _LONG_S
    while len(found := [int(path.suffix[1:]) for path in pids.glob("*-*.*")]) < 3 * len(_KINDS):
        assert time.monotonic() < until, sorted(path.name for path in pids.iterdir())
        time.sleep(0.02)
    return found


def test_what_a_killed_owner_started_ends(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    (tmp_path / "own.py").write_text(_OWN)
    (tmp_path / "own_loader.py").write_text(_LOADER)
    path = f"{child_python_path()}:{tmp_path}"
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(pids)], env={**os.environ, "PYTHONPATH": path}
    ) as owner:
        there = {pid: os.pidfd_open(pid) for pid in _named(pids)}
        owner.kill()
    poller = select.poll()
    for pidfd in there.values():
        poller.register(pidfd, select.POLLIN)
    until = time.monotonic() + _LONG_S
    while there and time.monotonic() < until:
        ended = {pidfd for pidfd, _ in poller.poll(1000)}
        for pid, pidfd in list(there.items()):
            if pidfd in ended:
                poller.unregister(pidfd)
                os.close(there.pop(pid))
    assert not there
