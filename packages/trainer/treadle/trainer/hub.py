"""The Hugging Face Hub: models and data files by their id, through huggingface_hub and its cache.

Invariant: a file is downloaded once per machine; HF_TOKEN, HF_HUB_OFFLINE and HF_HOME have their
usual meaning. What cannot be fetched is a `HubError` that names the id, the cause and the fix.
"""

import fnmatch
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from treadle.agent_loop import SetupError
from treadle.policy.client.hf_files import INDEX, MODEL_FILES

__all__ = [
    "HubError",
    "check_repository",
    "download_data",
    "download_model",
    "is_data_uri",
    "is_model_id",
    "push_model",
]

_MODEL_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")
# A URI that became a `Path` has lost a slash.
_DATA_URI = re.compile(
    r"hf:/{1,2}datasets/(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?/(?P<file>.+)"
)
_DATA_FORM = "hf://datasets/ORG/NAME/PATH, or hf://datasets/ORG/NAME@REVISION/PATH"
_WEIGHTS = ("*.safetensors",)

T = TypeVar("T")


class HubError(SetupError):
    """Something cannot be fetched from the Hub; the message names the cause."""


def is_model_id(text: str) -> bool:
    """Returns whether the text has the form ORG/NAME or ORG/NAME@REVISION."""
    return _MODEL_ID.fullmatch(text) is not None


def is_data_uri(path: Path | str) -> bool:
    """Returns whether a data file is named by its place on the Hub."""
    return str(path).startswith("hf:/")


def download_model(model_id: str, *, weights: bool = True, setting: str = "model.path") -> Path:
    """Returns the directory of a model in the Hub's cache, after downloading what is missing.

    Args:
        weights: Whether the tensors are needed too, not only configuration and tokenizer.
        setting: Names the model, for messages.

    Raises:
        HubError: It cannot be fetched.
    """
    from huggingface_hub import snapshot_download

    repo, _, revision = model_id.partition("@")
    # Without weights in other formats, which are as large again.
    patterns = [*MODEL_FILES, INDEX, *(_WEIGHTS if weights else ())]
    return _have(
        f"{setting}={model_id}",
        f"hf download {repo} --local-dir DIRECTORY",
        lambda: Path(snapshot_download(repo, revision=revision or None, allow_patterns=patterns)),
    )


def download_data(uri: Path | str) -> list[Path]:
    """Returns the files of a data set in the Hub's cache, after downloading what is missing.

    Args:
        uri: hf://datasets/ORG/NAME[@REVISION]/PATH; a `*` in the path stands for any characters.

    Returns:
        At least one file, by name.

    Raises:
        HubError: The URI is malformed, or a file cannot be fetched.
    """
    match = _DATA_URI.fullmatch(str(uri))
    if match is None:
        raise HubError(f"{uri} is not a data file on the Hub: it must be {_DATA_FORM}")
    repo, revision, pattern = match["repo"], match["revision"], match["file"]
    what = f"hf://datasets/{repo}{f'@{revision}' if revision else ''}/{pattern}"
    command = f"hf download {repo} --repo-type dataset --include '{pattern}' --local-dir DIRECTORY"

    def get() -> list[Path]:
        from huggingface_hub import hf_hub_download, snapshot_download

        if not any(character in pattern for character in "*?["):
            return [Path(hf_hub_download(repo, pattern, repo_type="dataset", revision=revision))]
        folder = Path(
            snapshot_download(
                repo, repo_type="dataset", revision=revision, allow_patterns=[pattern]
            )
        )
        names = (path.relative_to(folder).as_posix() for path in folder.rglob("*"))
        return [folder / name for name in sorted(names) if fnmatch.fnmatch(name, pattern)]

    files = [file for file in _have(what, command, get) if file.is_file()]
    if not files:
        raise HubError(f"{what}: the data set {repo} has no such file")
    return files


def check_repository(name: str) -> None:
    """Rejects what cannot be the name of a repository.

    Raises:
        HubError: It does not have the form ORG/NAME.
    """
    if not is_model_id(name) or "@" in name:
        raise HubError(f"{name!r} is not a repository on the Hub: it must be ORG/NAME")


def push_model(directory: Path, repo: str) -> str:
    """Uploads a model directory to the Hub; returns its address.

    Args:
        directory: All of its files are uploaded.
        repo: ORG/NAME; made as a private repository if it does not exist.

    Raises:
        HubError: It cannot be uploaded; the directory stays.
    """
    check_repository(repo)
    from huggingface_hub import HfApi
    from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

    hub = HfApi()
    try:
        hub.create_repo(repo, private=True, exist_ok=True)
        return str(hub.upload_folder(repo_id=repo, folder_path=directory).repo_url)
    except LocalTokenNotFoundError:
        cause = "there is no token: set HF_TOKEN, or run `hf auth login`"
    except OfflineModeIsEnabled:
        cause = "HF_HUB_OFFLINE is set: unset it"
    except (_http_error(), OSError) as error:
        cause = str(error).partition("\n")[0]
    raise HubError(
        f"{directory} cannot be pushed to {repo}: {cause}. The directory is complete; "
        f"`hf upload {repo} {directory}` pushes it later"
    ) from None


def _have(what: str, command: str, get: Callable[[], T]) -> T:
    """Calls `get`, and turns an error into a `HubError` of one sentence that names the cause."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return get()
    except GatedRepoError:
        cause = "its owner grants access per user: ask for it on its page, then set HF_TOKEN"
    except RevisionNotFoundError:
        cause = "it has no such revision"
    except RepositoryNotFoundError:
        cause = "there is no such repository, or it is private: check the name, or set HF_TOKEN"
    except LocalEntryNotFoundError:
        cause = (
            "it is not in the cache, and the Hub cannot be reached or HF_HUB_OFFLINE is set. Where "
            f"there is a connection, run `{command}`; then give that directory's path here"
        )
    except EntryNotFoundError:
        cause = "the repository has no such file"
    except (_http_error(), OSError) as error:
        cause = str(error).partition("\n")[0]
    raise HubError(f"{what} cannot be fetched from the Hugging Face Hub: {cause}") from None


def _http_error() -> type[Exception]:
    """Returns the base class of refused requests and lost connections."""
    # huggingface_hub's own errors derive from it; which HTTP library it is from differs by version.
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    return HTTPError
