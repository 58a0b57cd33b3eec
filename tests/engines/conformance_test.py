"""Runs the conformance kit as its users do, against an honest server and against faulty ones."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from treadle.rollout_server.testing.process import running_server

KIT = (sys.executable, "-m", "treadle.conformance")
FAULTY_SERVERS = "engines.faulty_servers"
OTHERS = "greedy repeats or completion is started or handshake says or reflection or health says"
"""Cheap checks that every faulty server of `test_a_fault_is_named` passes."""
SEED = 5
"""Weights for which some token's log-probs at temperatures 1 and 0.5 are far apart."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a checkpoint of the model in faulty_servers.py."""
    directory = tmp_path_factory.mktemp("weights")
    header = json.dumps(
        {
            "matrix": {"dtype": "F32", "shape": [64, 8], "data_offsets": [0, 2048]},
            "vector": {"dtype": "F32", "shape": [8], "data_offsets": [2048, 2080]},
        }
    ).encode()
    # Fixed, because what the servers sample, and how far a fault shows, follows from it.
    data = random.Random(SEED).randbytes(2080)
    path = directory / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return directory


def kit(*arguments: str, output: Path) -> tuple[int, dict[str, Any], str]:
    """Runs the kit and returns its exit code, its JSON and its output."""
    done = subprocess.run(
        [*KIT, *arguments, "--json", str(output)],
        # What a user gives pytest is not for the kit.
        env={**os.environ, "PYTEST_ADDOPTS": "--color=no"},
        capture_output=True,
        text=True,
        check=False,
    )
    found = json.loads(output.read_text()) if output.exists() else {}
    return done.returncode, found, done.stdout + done.stderr


def failing(found: dict[str, Any]) -> set[str]:
    return {check["check"] for check in found["checks"] if check["outcome"] == "does not"}


def test_an_honest_server_holds_everything(weights: Path, tmp_path: Path) -> None:
    arguments = ("--engine", f"{FAULTY_SERVERS}:honest", "--admission.max_in_flight", "32")
    more = ("--admission.max_queued", "32", "--weights.directory", str(weights))
    with running_server(*arguments, *more) as server:
        code, found, printed = kit(
            *("--address", server.address, "--weights", str(weights), "--places", "8"),
            *("--files", str(weights)),
            output=tmp_path / "found.json",
        )
    assert failing(found) == set()
    assert code == 0
    assert found["holds"] > 180
    assert f"{found['holds']} hold, 0 do not, {found['skipped']} skipped" in printed
    reasons = {check["seen"] for check in found["checks"] if check["outcome"] == "skipped"}
    assert all(reasons)


@pytest.mark.parametrize(
    ("name", "only", "caught"),
    [
        ("wrong_finish_reason", "stop id is", {"a stop id is the last token"}),
        (
            "wrong_logprobs",
            "draws follow",
            {
                "draws follow the distribution that is reported [cool]",
                "draws follow the distribution that is reported [hot top_p]",
            },
        ),
        (
            "new_rows_only",
            "experts come",
            {"experts come for every row that is asked for"},
        ),
        (
            "new_logprobs_only",
            "logprobs of the prompt come",
            {"logprobs of the prompt come before the tokens"},
        ),
        (
            "tokens_alone",
            "sampling mask",
            {"a logprob is that among the ids of its sampling mask"},
        ),
        ("stale_labels", "continue goes on", {"continue goes on with the new weights"}),
        ("swallowed_cancellation", "cancelling frees", {"cancelling frees the sequence"}),
        ("unseeded_draws", "seeds repeat", {"seeds repeat and differ"}),
        ("old_weights", "an update equals", {"an update equals a fresh engine"}),
        (
            "unchecked_chunks",
            "corrupt chunk",
            {"a corrupt chunk is refused and nothing of it kept"},
        ),
    ],
)
def test_a_fault_is_named(
    name: str, only: str, caught: set[str], weights: Path, tmp_path: Path
) -> None:
    found = ask_faulty_server(name, weights, tmp_path, only=f"{only} or {OTHERS}")
    assert failing(found) == caught


@pytest.mark.parametrize(
    ("part", "name", "caught"),
    [
        (
            "CheckDelta",
            "unchecked_deltas",
            {"a delta that leads elsewhere is refused and takes the base with it"},
        ),
        (
            "CheckDelta",
            "any_base",
            {"another base is refused with the one that is held"},
        ),
        (
            "CheckSharedMemory",
            "early_slots",
            {
                "it brings what inline brings [1-staged]",
                "it brings what inline brings [2-staged]",
                "tensors may be cut and mixed in buckets [staged]",
                # Nor does it check parts before it gives the slot back.
                "a part that has no place ends the update [ahead-staged]",
                "a part that has no place ends the update [beyond the tensor-staged]",
                "a part that has no place ends the update [empty-staged]",
                "a part that has no place ends the update [of no tensor-staged]",
            },
        ),
        (
            "CheckSharedMemory",
            "any_segment",
            {
                "a segment that is no senders is refused [seal]",
                "a segment that is no senders is refused [update]",
            },
        ),
        (
            "CheckInPlace",
            "served_mixtures",
            {
                "calls that wait are turned away when it ends without commit",
                "nothing is sampled after one without commit",
                "what continue kept ends when it ends without commit",
            },
        ),
        (
            "CheckFiles",
            "unchecked_files",
            {"files that are not as announced are refused [checksum]"},
        ),
        (
            "CheckBegin",
            "unrenewed_leases",
            {"a lease is renewed [GetUpdate]", "a lease is renewed [PushWeights]"},
        ),
        (
            "CheckCallsAgain",
            "forgotten_commits",
            {
                "an update that serves is known [staged]",
                "an update that serves is known [in place]",
                "an update that serves is not announced otherwise [staged]",
                "an update that serves is not announced otherwise [in place]",
            },
        ),
        (
            "CheckCallsAgain",
            "aborted_commits",
            {
                f"an update that {how} [{way}]"
                for how in ("served before is remembered", "serves is known")
                for way in ("staged", "in place")
            }
            | {"an update that is being committed is neither dropped nor begun"},
        ),
        ("CheckStream", "no_unknown_fields", {"fields that nobody knows are ignored"}),
        ("CheckStream", "lost_aborts", {"the load adds up while completions run"}),
        (
            "CheckGroup or malformed_group",
            "old_weights_of_groups",
            {"what a group brings is what an update brings"},
        ),
        (
            "CheckGroup or malformed_group",
            "groups_that_never_break",
            {
                "a member that does not come ends the update",
                "a sender that leaves in the middle ends the update",
            },
        ),
    ],
)
def test_a_fault_of_one_part_is_all_that_is_named(
    part: str, name: str, caught: set[str], weights: Path, tmp_path: Path
) -> None:
    assert failing(ask_faulty_server(name, weights, tmp_path, only=part)) == caught


def test_a_server_that_broke_is_asked_no_more(weights: Path, tmp_path: Path) -> None:
    found = ask_faulty_server(
        "breaks_at_pauses", weights, tmp_path, only="CheckStream or CheckPauses"
    )
    assert failing(found) == {"the load adds up while completions run"}
    after = [check["seen"] for check in found["checks"] if check["part"] == "pauses"]
    assert after and all("SERVER_STATE_FAILED" in seen for seen in after)


def test_groups_that_hold_are_said_to(weights: Path, tmp_path: Path) -> None:
    with running_server("--engine", f"{FAULTY_SERVERS}:honest_group") as server:
        code, found, printed = kit(
            *("--address", server.address, "--weights", str(weights), "--only", "group"),
            output=tmp_path / "found.json",
        )
    assert (code, failing(found)) == (0, set()), printed
    assert {check["part"] for check in found["checks"]} >= {"collective", "group"}


def ask_faulty_server(name: str, weights: Path, tmp_path: Path, *, only: str) -> dict[str, Any]:
    """Returns what the kit finds; some checks must hold, and each failure must say why."""
    files = ("--weights.directory", str(tmp_path))
    with running_server("--engine", f"{FAULTY_SERVERS}:{name}", *files) as server:
        code, found, printed = kit(
            *("--address", server.address, "--weights", str(weights), "--only", only),
            *("--files", str(tmp_path)),
            output=tmp_path / "found.json",
        )
    assert code == 1, printed
    assert found["holds"] >= 5, printed
    for check in found["checks"]:
        assert check["seen"] or check["outcome"] != "does not", "a failure without a reason"
    return found


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_a_server_with_tls_and_a_token_is_reached(tmp_path: Path) -> None:
    key, certificate, token = (tmp_path / name for name in ("key.pem", "cert.pem", "token"))
    token.write_text("secret\n")
    words = (
        f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {certificate} -days 1 "
        "-subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    subprocess.run(words.split(), check=True, capture_output=True)
    arguments = (
        *("--security.tls_certificate", str(certificate), "--security.tls_key", str(key)),
        *("--security.token_file", str(token), "--address", "localhost:0"),
    )
    with running_server("--engine", "fake", *arguments) as server:
        code, found, printed = kit(
            *("--address", server.address, "--ca", str(certificate), "--token-file", str(token)),
            *("--only", "token or completion is started or handshake says"),
            output=tmp_path / "found.json",
        )
        shut_out, _, why = kit("--address", server.address, output=tmp_path / "none.json")
    assert (code, failing(found)) == (0, set()), printed
    assert {"a call without the token is refused", "a call with a wrong token is refused"} <= {
        check["check"] for check in found["checks"] if check["outcome"] == "holds"
    }
    assert shut_out == 2
    assert "does not answer GetServerInfo" in why


def test_a_run_that_is_not_whole_is_no_result(tmp_path: Path) -> None:
    with running_server("--engine", "fake") as server:
        code, found, printed = kit(
            *("--address", server.address, "--only", "("), output=tmp_path / "found.json"
        )
    assert (code, found) == (2, {})
    assert "pytest ended with USAGE_ERROR: not all checks were run" in printed


def test_no_server_is_said_so(tmp_path: Path) -> None:
    code, _, printed = kit("--address", "127.0.0.1:1", output=tmp_path / "found.json")
    assert code == 2
    assert "127.0.0.1:1 does not answer GetServerInfo: UNAVAILABLE" in printed
