import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from treadle.tracing.trajectories import image_bytes, image_name, write_image
from treadle.tracing.trajectories.testing import write_run
from treadle.tracing.viewer.app import make_app
from treadle.tracing.viewer.runs import open_runs


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    run = write_run(tmp_path_factory.mktemp("runs") / "calculator", steps=3)
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": NaN}\n')
    with TestClient(
        make_app(open_runs([run]), token=None), base_url="http://127.0.0.1:6417"
    ) as opened:
        yield opened


def test_the_page_and_its_scripts_are_served(client: TestClient) -> None:
    page = client.get("/")
    assert "main.js" in page.text
    assert "script-src 'self';" in page.headers["content-security-policy"]
    assert "set-cookie" not in page.headers
    script = client.get("/main.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert script.headers["cache-control"] == "no-cache"
    again = client.get("/main.js", headers={"if-none-match": script.headers["etag"]})
    assert again.status_code == 304


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:6417", 200),
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("[::1]:6417", 200),
        ("evil.example:6417", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost:evil.example", 403),
        ("", 403),
    ],
)
def test_only_loopback_is_answered(client: TestClient, host: str, status: int) -> None:
    for path in ("/", "/api/runs"):
        assert client.get(path, headers={"host": host}).status_code == status


def test_an_image_is_served_by_its_name_only(tmp_path: Path) -> None:
    data = b"\x89PNG\r\n\x1a\n and whatever follows"
    run = write_run(tmp_path / "run", steps=1)
    name = image_name(data, "image/png")
    assert write_image(run / "trajectories", name, data) == len(data)
    assert write_image(run / "trajectories", name, data) == 0
    assert image_bytes(run / "trajectories") == len(data)
    (run / "trajectories" / "images" / "notes.png").write_bytes(data)
    with TestClient(make_app(open_runs([run]), token=None), base_url="http://127.0.0.1") as opened:
        found = opened.get(f"/api/runs/0/images/{name}")
        assert (found.content, found.headers["content-type"]) == (data, "image/png")
        assert found.headers["x-content-type-options"] == "nosniff"
        for other in ("notes.png", f"{name}x", "0" * 64 + ".png", "..%2F..%2Fconfig.json"):
            assert opened.get(f"/api/runs/0/images/{other}").status_code == 404
        assert opened.get(f"/api/runs/1/images/{name}").status_code == 404


def test_nothing_can_be_changed(client: TestClient) -> None:
    for path in ("/", "/api/runs", "/api/runs/0/trajectories"):
        assert client.post(path).status_code == 405
        assert client.delete(path).status_code == 405
    assert client.get("/..%2f..%2fapp.py").status_code == 404


def test_metrics_are_read_in_increments(client: TestClient) -> None:
    found = client.get("/api/runs/0/metrics").json()
    assert found["lines"] == [{"step": 1, "reward/mean": None}]
    rest = client.get("/api/runs/0/metrics", params={"cursor": found["cursor"]}).json()
    assert rest["lines"] == []


def test_the_table_is_filtered_sorted_and_paged(client: TestClient) -> None:
    def page(**params: str | int) -> dict[str, Any]:
        answer = client.get("/api/runs/0/trajectories", params=params)
        assert answer.status_code == 200
        found: dict[str, Any] = answer.json()
        return found

    everything = page(sort="-reward", limit=1000)
    assert everything["total"] == len(everything["rows"]) == 3 * (16 + 2)
    rewards = [row["reward"] for row in everything["rows"] if row["reward"] is not None]
    assert rewards == sorted(rewards, reverse=True)
    second = page(sort="-reward", limit=5, offset=5)
    assert second["rows"] == everything["rows"][5:10]
    assert "messages" not in second["rows"][0]
    failed = page(filter="error!= step=2")
    assert {row["step"] for row in failed["rows"]} == {2}
    assert all(row["error"] for row in failed["rows"])
    facets = client.get("/api/runs/0/facets").json()
    assert facets["tools"] == ["calculator", "python"]
    assert {"step": 2, "phase": "train", "trajectories": 16} in facets["steps"]


def test_a_trajectory_comes_with_its_group_and_its_other_steps(client: TestClient) -> None:
    where: dict[str, str | int] = {
        "step": 2,
        "phase": "train",
        "task_id": "train/1",
        "rollout_index": 2,
    }
    found = client.get("/api/runs/0/trajectory", params=where).json()
    assert [row["rollout_index"] for row in found["group"]] == [0, 1, 2, 3]
    assert {row["step"] for row in found["other_steps"]} == {1, 3}
    assert found["messages"][0]["role"] == "user"
    assert found["trace"][0]["attributes"]["task_id"] == "train/1"
    sample = found["samples"][0]
    assert sample["logprobs"][0] is None  # Of the prompt: not a number in the file.
    assert sample["spans"][0]["pieces"] is None  # The run names no model.


def test_the_time_of_a_step_is_told_by_cause(client: TestClient) -> None:
    found = client.get("/api/runs/0/timeline", params={"step": 1, "phase": "train"}).json()
    assert len(found["bars"]) == len(found["ends_s"]) == 16
    total = sum(bar["duration_s"] for bar in found["bars"])
    assert sum(found["totals"].values()) == pytest.approx(total)
    assert min(bar["start_s"] for bar in found["bars"]) == 0


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("runs/7/facets", 404, "there is no run 7: the page has 1"),
        ("runs/0/trajectories?filter=rewrd%3C1", 400, "did you mean reward?"),
        ("runs/0/trajectories?sort=size", 400, "there is no column 'size'"),
        ("runs/0/trajectories?limit=-1", 400, "limit='-1' is not a number"),
        ("runs/0/metrics?cursor=x", 400, "begin again with 0-0"),
        ("runs/0/timeline?phase=train", 400, "the parameter step is missing"),
        (
            "runs/0/trajectory?step=1&phase=train&task_id=x&rollout_index=0",
            404,
            "no readable file of this run has such a trajectory",
        ),
    ],
)
def test_what_is_wrong_with_a_request_is_said(
    client: TestClient, path: str, status: int, said: str
) -> None:
    answer = client.get(f"/api/{path}")
    assert answer.status_code == status
    assert said in json.loads(answer.content)["error"]


def test_nothing_is_answered_without_the_token(tmp_path: Path) -> None:
    """Found by an attacker: every user of the host could read prompts and answers."""
    run = write_run(tmp_path / "run", steps=1)
    app, base = make_app(open_runs([run]), token="a-token-of-the-run"), "http://127.0.0.1:6417"
    paths = ("/", "/main.js", "/api/runs", "/api/runs/0/trajectories?limit=5")
    with TestClient(app, base_url=base) as stranger:
        for path in paths:
            for headers in (
                {},
                {"authorization": "Bearer other"},
                {"cookie": "treadle-view-6417=x"},
            ):
                answer = stranger.get(path, headers=headers)
                assert (answer.status_code, b"messages" in answer.content) == (401, False)
        assert stranger.get("/?token=other").status_code == 401
        given = {"authorization": "Bearer a-token-of-the-run"}
        assert stranger.get("/api/runs", headers=given).status_code == 200
        assert stranger.get("/api/runs").status_code == 401

    with TestClient(app, base_url=base) as owner:
        first = owner.get("/?token=a-token-of-the-run&x=1", follow_redirects=False)
        assert (first.status_code, first.headers["location"]) == (303, "/?x=1")
        cookie = first.headers["set-cookie"].lower()
        assert "treadle-view-6417=" in cookie
        assert "httponly" in cookie
        assert "samesite=lax" in cookie
        away = owner.get(
            "http://127.0.0.1:6417//evil/?token=a-token-of-the-run", follow_redirects=False
        )
        assert away.headers["location"] == "/evil/"
        for path in paths:
            assert owner.get(path).status_code == 200
        assert owner.get("/api/runs", headers={"host": "127.0.0.1:1"}).status_code == 401
