"""Finds the model that `model.path` names: a directory, a trainer's run, or an id on the Hub.

Invariant: the model of a run is used only after its files were compared with the manifest that the
trainer wrote beside them. That reads them once, at about a gigabyte a second.
"""

import json
import re
import zlib
from pathlib import Path

__all__ = ["ModelPathError", "model_directory"]

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")
# Without weights in other formats, which are as large again.
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "LICENSE*")


class ModelPathError(ValueError):
    """`model.path` leads to no model; the message names the remedy."""


def model_directory(path: Path) -> Path:
    """Returns the local directory of a model.

    Args:
        path: A directory with a Hugging Face model; a trainer's run directory or one of its
            checkpoints, for the model that it holds in `hf`; or ORG/NAME or ORG/NAME@REVISION on
            the Hugging Face Hub, which is downloaded into the Hub's cache. An existing path wins.

    Raises:
        ModelPathError: There is no such model, or it cannot be fetched.
    """
    if path.exists():
        return _in_run(path)
    if _HUB_ID.fullmatch(str(path)):
        return _from_hub(str(path))
    raise ModelPathError(
        f"model.path={path} does not exist; it must be a Hugging Face model directory, a run "
        "directory of the trainer, or an id on the Hugging Face Hub as ORG/NAME"
    )


def _in_run(path: Path) -> Path:
    checkpoint = path
    if (path / "checkpoints").is_dir():
        latest = _latest(path / "checkpoints")
        if latest is None:
            raise ModelPathError(f"model.path={path} is a run directory without a checkpoint")
        checkpoint = latest
    elif path.parent.name != "checkpoints":
        return path
    if (checkpoint / "hf").is_dir():
        if (damage := _damage(checkpoint)) is not None:
            raise ModelPathError(
                f"model.path={path}: {checkpoint} cannot be used: {damage}. Name another checkpoint"
            )
        return checkpoint / "hf"
    run = checkpoint.parent.parent
    raise ModelPathError(
        f"model.path={path}: {checkpoint} holds no Hugging Face directory; write one with "
        f"`treadle export {run} OUT`, and set --model.path OUT"
    )


def _latest(checkpoints: Path) -> Path | None:
    """Returns the checkpoint that `latest` names; without one, the newest."""
    there = sorted(path for path in checkpoints.glob("step-*[0-9]") if path.is_dir())
    try:
        named = checkpoints / (checkpoints / "latest").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        named = None
    return named if named in there else there[-1] if there else None


def _damage(checkpoint: Path) -> str | None:
    """Returns how the model differs from what was written; None: it does not, or is of 0.1."""
    manifest = checkpoint / "manifest.json"
    if not manifest.exists():
        return None
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        written = {
            name: (int(entry["bytes"]), str(entry["crc32"]))
            for name, entry in files.items()
            if name.startswith("hf/")
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"manifest.json is damaged: {type(error).__name__}: {error}"
    for name, (size, crc32) in written.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if (found := path.stat().st_size) != size:
            return f"{name} has {found:,} bytes, and {size:,} were written"
        if _crc32(path) != crc32:
            return f"the content of {name} has changed since it was written"
    return None


def _crc32(path: Path) -> str:
    chunk, crc = memoryview(bytearray(1 << 20)), 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            crc = zlib.crc32(chunk[:count], crc)
    return f"{crc:08x}"


def _from_hub(model_id: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise ModelPathError(
            f"model.path={model_id} is not a directory here, and models of the Hugging Face Hub "
            "need huggingface_hub, which every engine but the fake one installs"
        ) from None
    repo, _, revision = model_id.partition("@")
    try:
        return Path(
            snapshot_download(repo, revision=revision or None, allow_patterns=list(_HUB_FILES))
        )
    except LocalEntryNotFoundError:
        cause = "it is not in the cache, and the Hub cannot be reached or HF_HUB_OFFLINE is set"
    except (HfHubHTTPError, OSError) as error:
        cause = str(error).partition("\n")[0]
    raise ModelPathError(
        f"model.path={model_id} is not a directory here and cannot be fetched from the Hugging "
        f"Face Hub: {cause}. Where there is a connection, run "
        f"`hf download {repo} --local-dir DIRECTORY`; "
        "then set --model.path DIRECTORY"
    )
