"""Against a small server that speaks the part of the Hub's protocol that huggingface_hub uses."""

import base64
import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from treadle.trainer.config.load import load_config
from treadle.trainer.data import DataError, read_rows
from treadle.trainer.hub import HubError, download_data, download_model, push_model
from treadle.trainer.model_source import resolve_model

_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_ROW = b'{"data_source": "d", "prompt": [{"role": "user", "content": "?"}], "reward_model": {}}\n'
_REPOS = {
    "models/acme/tiny": {
        "config.json": b'{"model_type": "qwen2"}',
        "model.safetensors": b"weights",
        "model.bin": b"the same once more",
    },
    "datasets/acme/sums": {"data/a.jsonl": _ROW, "data/b.jsonl": _ROW, "README.md": b"# Sums"},
}


_PUSHED: dict[str, bytes] = {}


class _Hub(BaseHTTPRequestHandler):
    """Repositories to read, and one to write. `acme/gated` has an owner who must grant access."""

    @property
    def _address(self) -> str:
        return f"http://{self.headers['Host']}"

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            name = json.loads(text)["name"]
            if name == "denied":
                return self._send(403, {}, b"{}")
            return self._send(200, {}, json.dumps({"url": f"{self._address}/acme/{name}"}).encode())
        if "/preupload/" in self.path:
            modes = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(text)["files"]
            ]
            return self._send(200, {}, json.dumps({"files": modes}).encode())
        assert "/commit/" in self.path, self.path
        for line in text.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                value = entry["value"]
                _PUSHED[value["path"]] = base64.b64decode(value["content"])
        answer = {"commitUrl": f"{self._address}/acme/mine/commit/{_COMMIT}", "commitOid": _COMMIT}
        return self._send(200, {}, json.dumps(answer).encode())

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = unquote(self.path.partition("?")[0]).removeprefix("/")
        if "acme/gated" in path:
            return self._send(403, {"X-Error-Code": "GatedRepo"}, b"")
        for repo, files in _REPOS.items():
            where = repo.removeprefix("models/")
            if path.startswith(f"api/{repo}"):
                listed = [
                    {
                        "rfilename": name,
                        "path": name,
                        "type": "file",
                        "size": len(content),
                        "oid": hashlib.sha1(content).hexdigest(),
                    }
                    for name, content in files.items()
                ]
                listing = "/tree/" in path
                info = {"id": repo, "sha": _COMMIT, "siblings": listed}
                text = json.dumps(listed if listing else info).encode()
                return self._send(200, {}, text, body=body)
            if path.startswith(f"{where}/resolve/"):
                name = path.split("/", where.count("/") + 3)[-1]
                if name in files:
                    etag = hashlib.sha1(files[name]).hexdigest()
                    head = {"ETag": f'"{etag}"', "X-Repo-Commit": _COMMIT}
                    return self._send(200, head, files[name], body=body)
                return self._send(404, {"X-Error-Code": "EntryNotFound"}, b"")
        return self._send(401, {"X-Error-Code": "RepoNotFound"}, b"")

    def _send(self, status: int, head: dict[str, str], text: bytes, *, body: bool = True) -> None:
        self.send_response(status)
        for key, value in head.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if body:
            self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str) -> Path:
    """Points huggingface_hub, which reads the environment when imported, at the server."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path


def _downloaded(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_model_is_downloaded_without_its_weights_in_other_formats(hub: Path) -> None:
    config = load_config([], ["model.path=acme/tiny", "data.train_files=[rows.jsonl]"]).config
    assert str(config.model.path) == "acme/tiny"
    assert _downloaded(resolve_model(config.model.path, weights=False)) == ["config.json"]
    folder = resolve_model(config.model.path)
    assert _downloaded(folder) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_a_directory_wins_over_an_id(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (hub / "acme" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(hub)
    config = load_config([], ["model.path=acme/tiny", "data.train_files=[rows.jsonl]"]).config
    assert config.model.path == hub / "acme" / "tiny"


def test_rows_are_read_from_the_hub(hub: Path) -> None:
    one = "data.train_files=[hf://datasets/acme/sums/data/a.jsonl]"
    config = load_config([], ["model.path=acme/tiny", one]).config
    assert len(read_rows(config.data.train_files)) == 1
    files = download_data("hf://datasets/acme/sums@main/data/*.jsonl")
    assert [file.name for file in files] == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    ("model_id", "text"),
    [
        ("acme/gated", "its owner grants access per user.*set HF_TOKEN"),
        ("acme/nothing", "there is no such repository, or it is private: .*set HF_TOKEN"),
    ],
)
def test_a_model_that_cannot_be_had_says_why(hub: Path, model_id: str, text: str) -> None:
    with pytest.raises(HubError, match=rf"model\.path={model_id} cannot be fetched .*: {text}"):
        download_model(model_id)


def test_data_that_cannot_be_had_says_why(hub: Path) -> None:
    for uri, text in {
        "hf://datasets/acme/sums/data/c.jsonl": "the repository has no such file",
        "hf://datasets/acme/sums/data/c*.jsonl": "has no such file",
        "hf://datasets/acme": "must be hf://datasets/ORG/NAME/PATH",
    }.items():
        with pytest.raises(DataError, match=text):
            read_rows([Path(uri)])


def test_offline_the_cache_serves_and_a_missing_model_says_how_to_get_it(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    folder = download_model("acme/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert download_model("acme/tiny") == folder
    with pytest.raises(HubError, match=r"not in the cache.*`hf download acme/other --local-dir"):
        download_model("acme/other")
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set: unset it"):
        push_model(folder, "acme/mine")


def test_a_model_is_pushed(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _PUSHED.clear()
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    folder = hub / "out"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert push_model(folder, "acme/mine").endswith("/acme/mine")
    assert _PUSHED == {"config.json": b"{}"}
    with pytest.raises(HubError, match="'mine' is not a repository on the Hub"):
        push_model(folder, "mine")
    with pytest.raises(HubError, match=r"`hf upload acme/denied .*` pushes it later"):
        push_model(folder, "acme/denied")


def test_a_hub_that_cannot_be_reached_says_so(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and never listens
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        with pytest.raises(HubError, match=r"cannot be pushed to acme/mine: .*`hf upload"):
            push_model(hub, "acme/mine")
        with pytest.raises(HubError, match=r"hf://datasets/acme/sums/data/.*cannot be fetched"):
            download_data("hf://datasets/acme/sums/data/*.jsonl")
