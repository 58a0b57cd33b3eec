"""The package index Pants uses: the one pip is configured for on this machine.

Prints `export` lines for .pants.bootstrap: PANTS_... for Pants and pex, which run pip isolated from
its configuration (pants.toml), so that without them a mirror, a folder of wheels or a private CA
would be invisible; and PIP_... for tests that run pip, to the same effect. Variables that are
already set are not changed. Standard library only, any Python from 3.8.
"""

from __future__ import annotations

import configparser
import os
import shlex
import sys
from pathlib import Path
from urllib.parse import unquote, urlparse

TORCH_ENV = "TREADLE_TORCH"  # "cpu" or "cuda" overrides what find-links suggests
# The settings that say where pip looks; others (such as `constraint`) do not apply to locks.
INDEX_SETTINGS = ("cert", "extra-index-url", "find-links", "index-url", "no-index")
TORCH_RESOLVES = ("default", "vllm", "sglang")  # resolves with a lock for each


def config_files() -> list[Path]:
    """Returns the configuration files that pip would read, weakest first."""
    explicit = os.environ.get("PIP_CONFIG_FILE")
    if explicit == os.devnull:
        return []
    home = Path.home()
    xdg_dirs = os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg"
    files = [Path(d) / "pip" / "pip.conf" for d in reversed(xdg_dirs.split(":"))]
    files.append(Path("/etc/pip.conf"))
    if not (explicit and Path(explicit).exists()):
        user = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
        files += [home / ".pip" / "pip.conf", user / "pip" / "pip.conf"]
    files.append(Path(os.environ.get("VIRTUAL_ENV") or sys.prefix) / "pip.conf")
    return [*files, Path(explicit)] if explicit else files


def pip_settings() -> dict[str, str]:
    """Returns pip's settings; names in its dashed spelling, the environment over the files."""
    settings: dict[str, str] = {}
    for path in config_files():
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError) as error:
            print(f"pants_env.py: ignoring {path}: {error}", file=sys.stderr)
            continue
        for section in ("global", "install"):
            if parser.has_section(section):
                settings.update({k.replace("_", "-"): v for k, v in parser.items(section)})
    for key, value in os.environ.items():
        if key.startswith("PIP_") and value:
            settings[key[len("PIP_") :].lower().replace("_", "-")] = value
    return settings


def values(settings: dict[str, str], name: str) -> list[str]:
    """Returns a setting of one or many values, each once; folders made absolute."""
    found = []
    for value in settings.get(name, "").split():
        local = os.path.expanduser(value)
        entry = os.path.abspath(local) if os.path.exists(local) else value
        if entry not in found:
            found.append(entry)
    return found


def local_folder(link: str) -> Path | None:
    """Returns the folder a find-links entry or a file: URL names, or None when it is remote."""
    parsed = urlparse(link)
    if parsed.scheme not in ("", "file"):
        return None
    path = Path(unquote(parsed.path) if parsed.scheme else link)
    return path if path.is_dir() else None


def offers_cpu_torch(indexes: list[str], find_links: list[str]) -> bool:
    """Returns whether pip would find a CPU build of torch, which needs no CUDA packages."""
    if any(index.rstrip("/").endswith("/cpu") for index in indexes):
        return True
    folders = [local_folder(link) for link in find_links]
    return any(f is not None and any(f.glob("torch-*cpu*.whl")) for f in folders)


def exports() -> dict[str, str]:
    """Returns the environment in which Pants resolves as pip does with its configuration."""
    pip = pip_settings()
    indexes = values(pip, "extra-index-url")
    add = "+"  # "+[...]" adds to Pants' default, which is the public index
    if "index-url" in pip:
        indexes, add = [pip["index-url"], *indexes], ""
    if pip.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        indexes, add = [], ""
    find_links = values(pip, "find-links")
    variables = {
        "PIP_" + name.upper().replace("-", "_"): " ".join(pip[name].split())
        for name in INDEX_SETTINGS
        if name in pip
    }
    if indexes or not add:
        variables["PANTS_PYTHON_REPOS_INDEXES"] = f"{add}{indexes!r}"
    if find_links:
        variables["PANTS_PYTHON_REPOS_FIND_LINKS"] = repr(find_links)
    cert = pip.get("cert") or os.environ.get("SSL_CERT_FILE", "")
    if cert and Path(cert).is_file():
        variables["PANTS_CA_CERTS_PATH"] = cert
    torch = os.environ.get(TORCH_ENV) or (
        "cpu" if offers_cpu_torch(indexes, find_links) else "cuda"
    )
    if torch not in ("cpu", "cuda"):
        raise SystemExit(f"{TORCH_ENV}={torch!r}: expected 'cpu' or 'cuda'")
    if torch == "cpu":
        locks = {name: f"3rdparty/python/{name}-cpu.lock.txt" for name in TORCH_RESOLVES}
        variables["PANTS_PYTHON_RESOLVES"] = f"+{locks!r}"
    return variables


def main() -> None:
    """Prints the variables that are not set yet."""
    for key, value in exports().items():
        if key not in os.environ:
            print(f"export {key}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
