"""Processes of a release and of today work together, over gRPC.

A client is a whole agent loop, a server the fake engine behind everything that a real one has. The
fake engine's tokens depend on the prompt, the seed and the weight version, so that whatever a
request or an answer lost on the way shows in them.
"""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from contract.descriptors import release_folders
from contract.programs import Programs
from treadle.agent_loop.rpc import ChannelSecurity
from treadle.policy.client.group import PolicyGroup
from treadle.policy.config.weight_sync import WeightSyncConfig
from treadle.policy.testing.weights_only import Weights
from treadle.policy.weight_sync.client import WeightSyncClient
from treadle.policy.weight_sync.publisher import WeightPublisher
from treadle.rollout.v1.server_service_pb2 import GetServerInfoResponse
from treadle.rollout_server.testing import running_server
from treadle.trainer.demo import DEMO

# The newest; the older ones are compared message by message (skew_test.py).
RELEASES = list(release_folders())[-1:]
FAKE = ("--engine", "fake", "--fake.vocab_size", "262", "--fake.eos_token_id", "256")
TODAY = Programs.of_today()
MODEL = DEMO.with_name("model")
# The shortest run in which a step samples from weights that an earlier one trained.
SHORT = (
    "schedule.total_steps=2",
    "schedule.val_every=null",
    "schedule.save_every=null",
    "data.prompts_per_step=2",
    "data.max_val_rows=1",
    "rollout.samples_per_prompt=2",
    "rollout.threads=1",
    "launch.policy_threads=1",
)


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    version: str = request.param
    return version


@pytest.fixture(scope="module")
def released(release: str, tmp_path_factory: pytest.TempPathFactory) -> Programs:
    folder = tmp_path_factory.mktemp("released") / "packages"
    programs = Programs.of_release(release_folders()[release], folder)
    printed = programs.run("-c", "import treadle; print(*treadle.__path__)")
    assert printed.split() == [str(folder / "treadle")]
    return programs


@pytest.fixture(scope="module")
def released_server(released: Programs) -> Iterator[str]:
    with running_server(*FAKE, command=released.server) as server:
        yield server.address


@pytest.fixture(scope="module")
def todays_server() -> Iterator[str]:
    with running_server(*FAKE, command=TODAY.server) as server:
        yield server.address


async def publish(address: str, version: int, transport: str, folder: Path) -> None:
    """Gives a server weights, as today's trainer does."""
    client = WeightSyncClient("one", address, control_deadline_s=30, commit_deadline_s=30)
    publisher = WeightPublisher(
        cast(PolicyGroup, Weights()),
        WeightSyncConfig.model_validate({"transport": transport}),
        element_type="float32",
        directory=folder,
    )
    try:
        report = await publisher.publish(version, [client])
        assert (report.served, report.failed) == (("one",), {})
    finally:
        await client.aclose()


def check_sampled(sampled: Mapping[str, Any]) -> None:
    """Two turns were sampled, by the weights that the server began with."""
    ids, mask, logprobs = (sampled[name] for name in ("ids", "loss_mask", "logprobs"))
    assert len(set(ids)) > 20
    assert [logprob < 0 for logprob in logprobs] == mask
    turns = "".join("x" if sampled else " " for sampled in mask).split()
    assert len(turns) == 2
    assert sampled["weight_versions"] == [0, 0]


def test_a_released_client_samples_on_todays_server_what_todays_client_does(
    release: str, released: Programs, todays_server: str
) -> None:
    ours, theirs = TODAY.sample_on(todays_server), released.sample_on(todays_server)
    assert theirs["packages"] == [f"{released.path[0]}/treadle"]
    assert theirs["packages"] != ours["packages"]
    assert theirs["server"] == ours["server"]
    assert theirs["server"]["health"] == "SERVING"
    assert theirs["server"]["version"] != release
    assert theirs["sampled"] == ours["sampled"]
    check_sampled(theirs["sampled"])


def test_todays_client_samples_on_a_released_server_what_a_released_client_does(
    release: str, released: Programs, released_server: str
) -> None:
    ours, theirs = TODAY.sample_on(released_server), released.sample_on(released_server)
    assert ours["server"]["version"] == release
    assert ours["server"]["health"] == "SERVING"
    assert ours["sampled"] == theirs["sampled"]
    check_sampled(ours["sampled"])


@pytest.mark.asyncio
async def test_a_released_server_serves_the_weights_that_todays_trainer_publishes(
    released: Programs, tmp_path: Path
) -> None:
    with running_server(
        *FAKE, "--weights.directory", str(tmp_path), command=released.server
    ) as server:
        sampled = [TODAY.sample_on(server.address)["sampled"]]
        for version, transport in enumerate(("inline", "shared_memory", "file"), start=1):
            await publish(server.address, version, transport, tmp_path)
            sampled.append(TODAY.sample_on(server.address)["sampled"])
    assert [s["weight_versions"] for s in sampled] == [[v, v] for v in range(4)]
    # The same weights, whichever way they came, and no longer those of the start.
    first, *later = (s["ids"] for s in sampled)
    assert later[0] != first
    assert later == [later[0]] * 3


def test_todays_server_keeps_what_the_released_conformance_kit_checks(
    released: Programs, tmp_path: Path
) -> None:
    arguments = ("--model.path", str(MODEL), "--weights.directory", str(tmp_path))
    with running_server("--engine", "fake", *arguments, command=TODAY.server) as server:
        printed = released.run(
            *("-m", "treadle.conformance", "--address", server.address),
            *("--weights", str(MODEL), "--files", str(tmp_path), "--only", "brings or serves"),
        )
    for checked in (
        "they bring what inline brings [staged]",
        "a delta brings what the whole brings",
    ):
        assert checked in printed
    found = re.search(r"^(\d+) hold, 0 do not, \d+ skipped$", printed, re.MULTILINE)
    assert found, printed
    assert int(found[1]) > 10


async def told(address: str, security: ChannelSecurity) -> GetServerInfoResponse:
    """Returns what a server tells of itself."""
    client = WeightSyncClient(
        "asked", address, control_deadline_s=30, commit_deadline_s=30, security=security
    )
    try:
        return await client.info()
    finally:
        await client.aclose()


def test_todays_trainer_trains_on_released_servers(released: Programs, tmp_path: Path) -> None:
    """One that the run starts, and one that somebody else runs."""
    token = tmp_path / "token"
    token.write_text("between us")
    token.chmod(0o600)
    foreign = (
        *("--engine", "torch", "--model.path", str(MODEL), "--model.num_threads", "1"),
        *("--model.context_length", "1024", "--security.token_file", str(token)),
    )
    with running_server(*foreign, command=released.server) as server:
        TODAY.run(
            *("-m", "treadle.trainer.main", f"run.dir={tmp_path}/run", *SHORT),
            f"rollout.server_command={list(released.server)}",
            "rollout.num_replicas=1",
            f"rollout.addresses=[{server.address}]",
            f"rollout.token_file={token}",
        )
        info = asyncio.run(told(server.address, ChannelSecurity(token="between us")))
    # Both took part, and the weights of the last step are published before the run ends.
    assert (info.load.started > 0, info.weight_version) == (True, 2)
    # The server knew every argument it was started with, and took the weights of the first step.
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["rollout/logprob_diff_max"] < 1e-4 for line in lines if line["step"]] == [True] * 2
    (last,) = (tmp_path / "run/trajectories.jsonl").read_text().splitlines()[-1:]
    spans = json.loads(last)["samples"][0]["spans"]
    assert {span["weight_version"] for span in spans if span["origin"] == "sampled"} == {1}
