import ast
import os
from pathlib import Path

import pants_env
import pytest


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PIP_") or name in ("SSL_CERT_FILE", pants_env.TORCH_ENV):
            monkeypatch.delenv(name)
    monkeypatch.setattr(pants_env, "config_files", lambda: [tmp_path / "pip.conf"])


def configure(tmp_path: Path, text: str) -> dict[str, str]:
    """What is exported to Pants."""
    (tmp_path / "pip.conf").write_text(text)
    found = pants_env.exports()
    return {name: value for name, value in found.items() if name.startswith("PANTS_")}


def test_a_machine_without_configuration_changes_nothing() -> None:
    assert pants_env.exports() == {}


def test_extra_indexes_come_after_the_default_one(tmp_path: Path) -> None:
    found = configure(
        tmp_path,
        "[global]\nextra-index-url = file:///srv/simple\n    https://mirror.invalid/simple\n",
    )
    assert found == {
        "PANTS_PYTHON_REPOS_INDEXES": "+['file:///srv/simple', 'https://mirror.invalid/simple']"
    }


def test_an_own_index_replaces_the_default_one(tmp_path: Path) -> None:
    found = configure(
        tmp_path,
        "[global]\nindex-url = https://a.invalid/simple\n[install]\nextra_index_url = file:///b\n",
    )
    assert found == {"PANTS_PYTHON_REPOS_INDEXES": "['https://a.invalid/simple', 'file:///b']"}


def test_no_index_leaves_find_links(tmp_path: Path) -> None:
    found = configure(tmp_path, "[global]\nno-index = true\nfind-links = https://w.invalid/\n")
    assert found == {
        "PANTS_PYTHON_REPOS_INDEXES": "[]",
        "PANTS_PYTHON_REPOS_FIND_LINKS": "['https://w.invalid/']",
    }


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_cpu_wheel_in_find_links_selects_the_cpu_lock(tmp_path: Path, scheme: str) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    found = configure(tmp_path, f"[global]\nfind-links =\n    {scheme}{wheels}\n")
    assert found["PANTS_PYTHON_REPOS_FIND_LINKS"] == f"['{scheme}{wheels}']"
    assert ast.literal_eval(found["PANTS_PYTHON_RESOLVES"].removeprefix("+")) == {
        name: f"3rdparty/python/{name}-cpu.lock.txt" for name in ("default", "vllm", "sglang")
    }


def test_the_torch_build_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pants_env.TORCH_ENV, "cpu")
    assert "PANTS_PYTHON_RESOLVES" in pants_env.exports()
    monkeypatch.setenv(pants_env.TORCH_ENV, "rocm")
    with pytest.raises(SystemExit, match="expected 'cpu' or 'cuda'"):
        pants_env.exports()


def test_the_environment_beats_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "https://env.invalid/")
    found = configure(tmp_path, "[global]\nfind-links = https://file.invalid/\n")
    assert found == {"PANTS_PYTHON_REPOS_FIND_LINKS": "['https://env.invalid/']"}


def test_only_a_certificate_file_is_handed_on(tmp_path: Path) -> None:
    assert configure(tmp_path, "[global]\ncert = /nowhere/ca.pem\n") == {}
    bundle = tmp_path / "ca.pem"
    bundle.touch()
    assert configure(tmp_path, f"[global]\ncert = {bundle}\n") == {
        "PANTS_CA_CERTS_PATH": str(bundle)
    }


def test_pip_without_its_configuration_looks_in_the_same_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.conf").write_text(
        "[global]\nconstraint = /caps.txt\nno_index = true\n"
        "extra-index-url = file:///a\n    file:///b\n"
    )
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    exports = pants_env.exports()
    assert {name: exports[name] for name in exports if name.startswith("PIP_")} == {
        "PIP_EXTRA_INDEX_URL": "file:///a file:///b",
        "PIP_FIND_LINKS": "/wheels",
        "PIP_NO_INDEX": "true",
    }
