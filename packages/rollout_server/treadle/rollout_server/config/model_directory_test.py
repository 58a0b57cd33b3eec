import json
import zlib
from pathlib import Path

import pytest

from treadle.rollout_server.config.command_line import ServerConfigError, parse


def _checkpoint(run: Path, *, hf: bool) -> Path:
    checkpoint = run / "checkpoints" / "step-00000007"
    (checkpoint / "hf" if hf else checkpoint).mkdir(parents=True)
    (run / "checkpoints" / "latest").write_text("step-00000007\n")
    return checkpoint


def test_a_run_directory_and_a_checkpoint_stand_for_their_model(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path, hf=True)
    for given in (tmp_path, checkpoint, checkpoint / "hf"):
        assert parse(["--model.path", str(given)]).model.path == checkpoint / "hf"
    (tmp_path / "model").mkdir()
    assert parse(["--model.path", str(tmp_path / "model")]).model.path == tmp_path / "model"


def test_latest_is_a_hint(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path, hf=True)
    for text in ("step-00000009\n", "", "../..\n"):
        (tmp_path / "checkpoints" / "latest").write_text(text)
        assert parse(["--model.path", str(tmp_path)]).model.path == checkpoint / "hf"
    (tmp_path / "checkpoints" / "latest").unlink()
    assert parse(["--model.path", str(tmp_path)]).model.path == checkpoint / "hf"


def test_a_damaged_model_of_a_run_is_not_served(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path, hf=True)
    weights, manifest = checkpoint / "hf" / "model.safetensors", checkpoint / "manifest.json"
    entry = {"bytes": 7, "crc32": f"{zlib.crc32(b'weights'):08x}"}
    manifest.write_text(json.dumps({"files": {"hf/model.safetensors": entry}}))
    weights.write_bytes(b"weights")
    assert parse(["--model.path", str(tmp_path)]).model.path == checkpoint / "hf"
    for content, said in ((b"weightz", "has changed"), (b"weigh", "has 5 bytes, and 7 were")):
        weights.write_bytes(content)
        for given in (tmp_path, checkpoint):
            with pytest.raises(ServerConfigError, match=f"step-00000007 cannot be used: .*{said}"):
                parse(["--model.path", str(given)])
    weights.unlink()
    with pytest.raises(ServerConfigError, match=r"hf/model\.safetensors is missing"):
        parse(["--model.path", str(tmp_path)])
    manifest.write_text("[]")
    with pytest.raises(ServerConfigError, match=r"manifest\.json is damaged"):
        parse(["--model.path", str(tmp_path)])


def test_what_leads_to_no_model_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ServerConfigError, match=r"model\.path=/no/model/here does not exist"):
        parse(["--model.path", "/no/model/here"])
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ServerConfigError, match="a run directory without a checkpoint"):
        parse(["--model.path", str(tmp_path / "empty")])
    _checkpoint(tmp_path, hf=False)
    with pytest.raises(ServerConfigError, match=r"`treadle export .* OUT`"):
        parse(["--model.path", str(tmp_path)])


def test_an_id_that_is_not_in_the_cache_is_explained_offline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ServerConfigError, match=r"not in the cache.*`hf download acme/tiny "):
        parse(["--model.path", "acme/tiny"])
