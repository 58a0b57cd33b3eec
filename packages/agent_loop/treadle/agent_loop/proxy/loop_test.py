"""Black-box agents as agent loops: how they end, and what becomes of their trajectories."""

import asyncio
import os
import select
import shutil
import ssl
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from treadle.agent_loop import (
    AgentTask,
    Drop,
    EngineFailedError,
    LoopError,
    LoopLimits,
    LoopRegistry,
    Message,
    Retry,
    RolloutRunner,
    RunReport,
    SamplingParams,
    Services,
    SetupError,
    StopReason,
    Trajectory,
    TrajectoryTimeoutError,
)
from treadle.agent_loop.proxy import (
    AgentCrashedError,
    AgentSession,
    CommandAgent,
    OnCrash,
    ProxyAgentLoop,
    TlsFiles,
)
from treadle.agent_loop.testing import ByteRenderer, ScriptedGenerator

TASK = AgentTask(
    task_id="t",
    sample_index=0,
    rollout_index=0,
    loop="agent",
    messages=(Message(role="user", content="What is 2 + 3?"),),
    fields={"ground_truth": "5"},
)


def services(generator: ScriptedGenerator, **limits: Any) -> Services:
    return Services(
        generator=generator,
        renderer=ByteRenderer(),
        limits=replace(LoopLimits(max_response_tokens=500), **limits),
        sampling=SamplingParams(max_tokens=100, temperature=1.0),
    )


async def ask(session: AgentSession, *contents: str) -> httpx.Response:
    """Asks as a plain HTTP client."""
    headers = {"authorization": f"Bearer {session.api_key}"}
    messages = [{"role": "user", "content": content} for content in contents]
    async with httpx.AsyncClient(headers=headers, verify=False, timeout=None) as web:
        return await web.post(f"{session.base_url}/chat/completions", json={"messages": messages})


async def ask_and_crash(session: AgentSession) -> None:
    await ask(session, "u")
    raise KeyError("no such thing")


@pytest.mark.asyncio
async def test_1_a_crash_fails_the_attempt_with_its_cause() -> None:
    with pytest.raises(AgentCrashedError, match="agent of task 't': KeyError") as caught:
        await ProxyAgentLoop(ask_and_crash).run(TASK, services(ScriptedGenerator(["one"])))
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.retryable


@pytest.mark.asyncio
async def test_2_or_what_was_sampled_until_then_is_delivered() -> None:
    loop = ProxyAgentLoop(ask_and_crash, on_crash=OnCrash.DELIVER)
    trajectory = await loop.run(TASK, services(ScriptedGenerator(["one"])))
    assert trajectory.stop is StopReason.AGENT_FAILED
    assert trajectory.final_text == "one"
    assert trajectory.error is None
    assert [f.kind for f in trajectory.findings] == ["agent_crashed"]
    assert {m.name: m.value for m in trajectory.metrics}["proxy/agent_crashes"] == 1


@pytest.mark.asyncio
async def test_3_a_crash_before_the_first_completion_always_fails() -> None:
    async def agent(session: AgentSession) -> None:
        raise OSError("disk")

    with pytest.raises(AgentCrashedError, match="disk"):
        await ProxyAgentLoop(agent, on_crash=OnCrash.DELIVER).run(
            TASK, services(ScriptedGenerator())
        )


@pytest.mark.asyncio
async def test_4_an_agent_that_asks_for_nothing_fails() -> None:
    async def agent(session: AgentSession) -> None:
        pass

    with pytest.raises(LoopError, match="got no completion"):
        await ProxyAgentLoop(agent).run(TASK, services(ScriptedGenerator()))


@pytest.mark.asyncio
async def test_5_a_crash_because_of_a_limit_is_an_ordinary_end() -> None:
    async def agent(session: AgentSession) -> None:
        await ask(session, "u")
        (await ask(session, "v")).raise_for_status()

    trajectory = await ProxyAgentLoop(agent).run(
        TASK, services(ScriptedGenerator(["one"]), max_assistant_turns=1)
    )
    assert trajectory.stop is StopReason.ASSISTANT_TURNS
    assert trajectory.findings == ()


@pytest.mark.parametrize("crash", [True, False])
@pytest.mark.asyncio
async def test_6_a_failure_of_the_servers_is_not_the_agent_s(crash: bool) -> None:
    async def agent(session: AgentSession) -> None:
        await ask(session, "u")
        answer = await ask(session, "v")
        if crash:
            answer.raise_for_status()

    generator = ScriptedGenerator(["one", EngineFailedError("out of memory")])
    with pytest.raises(EngineFailedError, match="out of memory"):
        await ProxyAgentLoop(agent, on_crash=OnCrash.DELIVER).run(TASK, services(generator))


@pytest.mark.asyncio
async def test_7_requests_that_outlive_their_agent_are_cancelled() -> None:
    generator = ScriptedGenerator(["one"])
    answers: list[asyncio.Task[httpx.Response]] = []

    async def agent(session: AgentSession) -> None:
        await ask(session, "u")
        generator.hold()
        answers.append(asyncio.create_task(ask(session, "v")))
        await generator.until_running(1)

    trajectory = await ProxyAgentLoop(agent).run(TASK, services(generator))
    assert len(trajectory.samples) == 1
    assert generator.num_aborted == 1
    assert (await answers[0]).status_code == 499


async def collect(
    loop: ProxyAgentLoop, kit: Services, tasks: Sequence[AgentTask], **options: Any
) -> tuple[list[Trajectory], RunReport]:
    ended: list[Trajectory] = []

    async def sink(trajectory: Trajectory) -> None:
        ended.append(trajectory)

    runner = RolloutRunner(
        LoopRegistry({"agent": loop}),
        kit,
        **{"max_in_flight": 8, "deadline_s": 60.0, "failure_policy": Drop(), **options},
    )
    return ended, await runner.run(tasks, sink)


@pytest.mark.asyncio
async def test_8_a_crash_that_is_tried_again_has_a_session_of_its_own() -> None:
    sessions: list[AgentSession] = []

    async def agent(session: AgentSession) -> None:
        sessions.append(session)
        await ask(session, "u")
        if len(sessions) == 1:
            raise RuntimeError("once")

    kit = services(ScriptedGenerator(["one", "two"]))
    ended, report = await collect(ProxyAgentLoop(agent), kit, [TASK], failure_policy=Retry())
    assert (report.num_retries, report.num_failed) == (1, 0)
    assert ended[0].final_text == "two"
    assert sessions[0].base_url != sessions[1].base_url
    assert sessions[0].api_key != sessions[1].api_key
    assert sessions[0].api_key not in repr(sessions[0])


@pytest.mark.asyncio
async def test_9_trajectories_at_the_same_time_do_not_mix() -> None:
    async def agent(session: AgentSession) -> None:
        for turn in range(3):
            await ask(session, f"{session.task.task_id} {turn}")

    generator = ScriptedGenerator(["ok"] * 60)
    tasks = [
        AgentTask(
            task_id=f"t{i}", sample_index=i, rollout_index=0, loop="agent", messages=TASK.messages
        )
        for i in range(20)
    ]
    ended, report = await collect(ProxyAgentLoop(agent), services(generator), tasks)
    assert report.num_failed == 0
    for trajectory in ended:
        text = "".join(ByteRenderer().decode(sample.ids) for sample in trajectory.samples)
        name = trajectory.task.task_id
        assert [f"<user>{name} {turn}<end>" in text for turn in range(3)] == [True] * 3
    assert len({r.context.session_id for r in generator.requests}) == 20


WAIT = "import sys, time\nprint('waiting', flush=True)\ntime.sleep(600)"


@pytest.mark.asyncio
async def test_9b_sessions_with_one_key_are_told_apart_by_their_addresses() -> None:
    keys, addresses = set(), set()

    async def agent(session: AgentSession) -> None:
        keys.add(session.api_key)
        addresses.add(session.base_url)
        assert (await ask(session, "u")).status_code == 200

    loop = ProxyAgentLoop(agent, api_key="the-key-of-all-sessions")
    async with asyncio.TaskGroup() as group:
        for number in range(3):
            task = replace(TASK, rollout_index=number)
            group.create_task(loop.run(task, services(ScriptedGenerator(["one"]))))
    assert keys == {"the-key-of-all-sessions"}
    assert len(addresses) == 3
    with pytest.raises(ValueError, match="api_key has 5 characters; it must have at least 16"):
        ProxyAgentLoop(agent, api_key="short")


@pytest.mark.asyncio
async def test_10_a_cancellation_ends_the_agent_with_all_that_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    os.mkfifo(pids)
    code = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {WAIT!r}])
with open({str(pids)!r}, "w") as file:
    file.write(f"{{os.getpid()}} {{child.pid}}")
child.wait()
"""
    loop = ProxyAgentLoop([sys.executable, "-c", code])
    running = asyncio.create_task(loop.run(TASK, services(ScriptedGenerator())))
    found = (await asyncio.to_thread(pids.read_text)).split()
    handles = [os.pidfd_open(int(pid)) for pid in found]
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    for handle in handles:
        assert select.select([handle], [], [], 60.0)[0], "it still runs"
        os.close(handle)


@pytest.mark.asyncio
async def test_10b_a_deadline_is_a_cancellation() -> None:
    loop = ProxyAgentLoop([sys.executable, "-c", WAIT])
    ended, _ = await collect(loop, services(ScriptedGenerator()), [TASK], deadline_s=0.2)
    assert isinstance(ended[0].error, TrajectoryTimeoutError)


ASKING = """
import json, os, sys, urllib.request

task = json.load(sys.stdin)
assert task["fields"] == {"ground_truth": "5"}, task

def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode())
    request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    return json.load(urllib.request.urlopen(request))

answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": task["messages"]})
text = answer["choices"][0]["message"]["content"]
post(os.environ["TREADLE_REWARD_URL"], {"reward": float(text == task["fields"]["ground_truth"])})
print("x" * 100000)
sys.exit(int(os.environ.get("STATUS", "0")))
"""


@pytest.mark.asyncio
async def test_11_a_program_finds_task_and_model_and_posts_its_reward() -> None:
    loop = ProxyAgentLoop([sys.executable, "-c", ASKING])
    trajectory = await loop.run(TASK, services(ScriptedGenerator(["5"])))
    assert trajectory.reward == 1.0
    assert trajectory.messages == (*TASK.messages, Message(role="assistant", content="5"))


@pytest.mark.asyncio
@pytest.mark.parametrize("bypassed", ["", "other.example", "*"])
async def test_11b_a_program_reaches_its_model_where_others_are_behind_a_proxy(
    bypassed: str,
) -> None:
    environment = {"http_proxy": "http://127.0.0.1:1", "no_proxy": bypassed, "NO_PROXY": bypassed}
    agent = CommandAgent([sys.executable, "-c", ASKING], environment=environment)
    trajectory = await ProxyAgentLoop(agent).run(TASK, services(ScriptedGenerator(["5"])))
    assert trajectory.reward == 1.0


@pytest.mark.asyncio
async def test_12_a_program_s_status_is_its_failure_with_what_it_printed_last() -> None:
    agent = CommandAgent([sys.executable, "-c", ASKING], environment={"STATUS": "3"})
    with pytest.raises(AgentCrashedError, match=r"ended with status 3: x{1000,}"):
        await ProxyAgentLoop(agent).run(TASK, services(ScriptedGenerator(["5"])))


@pytest.mark.asyncio
async def test_13_a_program_that_is_not_there_or_is_killed_says_so() -> None:
    kit = services(ScriptedGenerator())
    with pytest.raises(AgentCrashedError, match="'/no/such/agent' does not start"):
        await ProxyAgentLoop(["/no/such/agent"]).run(TASK, kit)
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(AgentCrashedError, match="ended by signal 9: it printed nothing"):
        await ProxyAgentLoop([sys.executable, "-c", code]).run(TASK, kit)


@pytest.mark.asyncio
async def test_14_a_child_that_outlives_the_program_is_ended_and_holds_nothing_up() -> None:
    code = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {WAIT!r}])
sys.exit(4)
"""
    with pytest.raises(AgentCrashedError, match="status 4"):
        await ProxyAgentLoop([sys.executable, "-c", code]).run(TASK, services(ScriptedGenerator()))


@pytest.mark.asyncio
@pytest.mark.parametrize(("inherited", "got"), [(None, True), (["PATH"], False), (["OURS"], True)])
async def test_14b_a_program_gets_of_our_environment_what_it_may(
    monkeypatch: pytest.MonkeyPatch, inherited: list[str] | None, got: bool
) -> None:
    monkeypatch.setenv("OURS", "1")
    code = "import os; assert {'OPENAI_API_KEY', 'MORE'} <= os.environ.keys(); "
    code += "exit(5 + ('OURS' in os.environ))"
    agent = CommandAgent(
        [sys.executable, "-c", code], environment={"MORE": "1"}, inherited=inherited
    )
    with pytest.raises(AgentCrashedError, match=f"status {5 + got}"):
        await ProxyAgentLoop(agent).run(TASK, services(ScriptedGenerator()))


@pytest.mark.asyncio
async def test_15_an_address_that_is_taken_stops_the_run() -> None:
    async def agent(session: AgentSession) -> None:
        port = int(session.base_url.split(":")[2].split("/")[0])
        with pytest.raises(SetupError, match=f"cannot listen on 127.0.0.1 port {port}"):
            await ProxyAgentLoop(agent, port=port).run(TASK, kit)
        await ask(session, "u")

    kit = services(ScriptedGenerator(["one"]))
    await ProxyAgentLoop(agent).run(TASK, kit)


@pytest.mark.asyncio
async def test_15b_agents_are_told_an_address_that_they_can_reach() -> None:
    addresses: list[str] = []

    async def agent(session: AgentSession) -> None:
        addresses.append(session.base_url)
        await ask(session, "u")

    loop = ProxyAgentLoop(
        agent,
        host="0.0.0.0",
        told_host="localhost",
        insecure_allow_plaintext_beyond_loopback=True,
    )
    await loop.run(TASK, services(ScriptedGenerator(["one"])))
    assert addresses[0].startswith("http://localhost:")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "gpu7", "127.0.0.1.example.org"])
def test_15c_beyond_loopback_plain_text_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match=r"is reachable from other machines.*in plain text"):
        ProxyAgentLoop(["true"], host=host, told_host="localhost")


def self_signed(folder: Path) -> TlsFiles:
    tls = TlsFiles(certificate=folder / "certificate.pem", key=folder / "key.pem")
    command = (
        f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {tls.key} -out {tls.certificate} "
        "-days 1 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    subprocess.run(command.split(), check=True, capture_output=True, timeout=60)
    return tls


@pytest.mark.asyncio
@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
async def test_15d_with_a_certificate_the_endpoint_speaks_https(tmp_path: Path) -> None:
    tls = self_signed(tmp_path)
    trusted = ssl.create_default_context(cafile=str(tls.certificate))

    async def agent(session: AgentSession) -> None:
        assert session.base_url.startswith("https://localhost:")
        async with httpx.AsyncClient(verify=trusted) as web:
            answer = await web.post(
                f"{session.base_url}/chat/completions",
                json={"messages": [{"role": "user", "content": "u"}]},
                headers={"authorization": f"Bearer {session.api_key}"},
            )
        assert answer.status_code == 200, answer.text

    loop = ProxyAgentLoop(agent, host="0.0.0.0", told_host="localhost", tls=tls)
    await loop.run(TASK, services(ScriptedGenerator(["one"])))
    with pytest.raises(SetupError, match=r"cannot serve with .*none\.pem"):
        none = TlsFiles(certificate=tmp_path / "none.pem", key=tls.key)
        await ProxyAgentLoop(agent, tls=none).run(TASK, services(ScriptedGenerator([])))


@pytest.mark.asyncio
async def test_16_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="max_requests is 0"):
        ProxyAgentLoop(["true"], max_requests=0)
    with pytest.raises(ValueError, match="told_host must say"):
        ProxyAgentLoop(["true"], host="0.0.0.0")
    with pytest.raises(ValueError, match="must be a list"):
        ProxyAgentLoop("python agent.py")
    with pytest.raises(ValueError, match="grace_s"):
        CommandAgent(["true"], grace_s=-1)
    with pytest.raises(ValueError, match="'perhaps' is not a valid OnCrash"):
        ProxyAgentLoop(["true"], on_crash="perhaps")  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_17_a_reward_that_is_none_fails_the_attempt() -> None:
    async def agent(session: AgentSession) -> float:
        await ask(session, "u")
        return float("nan")

    with pytest.raises(AgentCrashedError, match="the reward is nan"):
        await ProxyAgentLoop(agent).run(TASK, services(ScriptedGenerator(["one"])))


def test_18_one_loop_serves_several_event_loops() -> None:
    async def agent(session: AgentSession) -> None:
        await ask(session, "u")

    loop = ProxyAgentLoop(agent)
    for _ in range(2):
        trajectory = asyncio.run(loop.run(TASK, services(ScriptedGenerator(["one"]))))
        assert trajectory.final_text == "one"


@pytest.mark.asyncio
async def test_19_the_reward_is_the_agent_s_if_it_has_one() -> None:
    async def posting(session: AgentSession) -> float | None:
        await ask(session, "u")
        headers = {"authorization": f"Bearer {session.api_key}"}
        async with httpx.AsyncClient(headers=headers, verify=False) as web:
            for reward in (0.25, 0.5):
                answer = await web.post(session.reward_url, json={"reward": reward})
                assert answer.json() == {"reward": reward}
            for wrong in (
                {"reward": "1"},
                {"reward": True},
                {"rewards": 1},
                {"reward": 10**400},
                [1],
            ):
                answer = await web.post(session.reward_url, json=wrong)
                assert answer.status_code == 400
            answer = await web.post(session.reward_url, content=b'{"reward": NaN}')
            assert answer.status_code == 400
        return None

    async def returning(session: AgentSession) -> float | None:
        await posting(session)
        return 2

    for agent, reward in ((posting, 0.5), (returning, 2.0)):
        kit = services(ScriptedGenerator(["one"]))
        assert (await ProxyAgentLoop(agent).run(TASK, kit)).reward == reward
