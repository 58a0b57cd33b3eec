import json
from pathlib import Path

import pytest

from treadle.agent_loop import SetupError
from treadle.trainer.evaluation.source import find_source


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _run(name: str, *, steps: dict[int, bool], latest: int | None = None) -> Path:
    """Makes a run directory; `steps` says which checkpoints hold a model."""
    run = Path(name)
    (run / "checkpoints").mkdir(parents=True)
    for step, has_model in steps.items():
        checkpoint = run / "checkpoints" / f"step-{step:08d}"
        checkpoint.mkdir()
        state = {"format": 1, "step": step, "metrics": {}}
        (checkpoint / "state.json").write_text(json.dumps(state))
        if has_model:
            (checkpoint / "hf").mkdir()
    if steps:
        newest = max(steps) if latest is None else latest
        (run / "checkpoints" / "latest").write_text(f"step-{newest:08d}\n")
    return run


def test_a_model_is_a_directory_an_id_or_a_demo() -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    assert find_source("model").model == str(Path("model").absolute())
    assert find_source("Qwen/Qwen3-0.6B").model == "Qwen/Qwen3-0.6B"
    assert find_source("demo:calculator").model == "demo:calculator"


@pytest.mark.parametrize("address", ["127.0.0.1:4000", "host-1.example:80", "[::1]:4000"])
def test_an_address_is_host_and_port(address: str) -> None:
    source = find_source(address)
    assert source.address == address
    assert source.model is None


def test_a_path_wins_over_what_else_it_may_mean() -> None:
    for name in ("host:80", "org/name"):
        Path(name).mkdir(parents=True)
        (Path(name) / "config.json").write_text("{}")
        assert find_source(name).model == str(Path(name).absolute())


def test_a_run_gives_its_latest_model_or_that_of_a_step() -> None:
    run = _run("run", steps={10: True, 20: True})
    latest = find_source("run")
    assert (latest.step, latest.run) == (20, run.absolute())
    assert latest.config == run.absolute() / "config.json"
    assert latest.model == str(run.absolute() / "checkpoints/step-00000020/hf")
    assert find_source("run", step=10).step == 10
    assert find_source("run/checkpoints/step-00000010").step == 10


def test_a_checkpoint_with_a_configuration_of_its_own_is_evaluated_with_that() -> None:
    saved = _run("run", steps={10: True}).absolute() / "checkpoints/step-00000010/config.json"
    saved.write_text("{}")
    assert find_source("run").config == saved


def test_a_latest_checkpoint_without_a_model_stands_for_it() -> None:
    run = _run("run", steps={10: True, 20: False, 30: True}, latest=20).absolute()
    source = find_source("run")
    assert source.step == 20
    assert source.model == str(run / "checkpoints/step-00000020")  # `resolve_model` writes it


@pytest.mark.parametrize(
    ("text", "step", "message"),
    [
        ("nothing", None, "there is no nothing; it must be a model directory"),
        ("host:99999", None, "there is no host:99999"),
        ("file", None, "file is a file"),
        ("empty", None, "empty is neither a model nor a run"),
        ("young", None, "young is a run without a checkpoint"),
        ("run", 30, "no checkpoint of step 30; steps with a checkpoint: 10, 20"),
        ("run/checkpoints/step-00000010", 10, "--step 10: .* is a checkpoint already"),
        ("demo:calculator", 10, "--step 10: only a run has steps"),
        ("127.0.0.1:4000", 10, "--step 10: only a run has steps"),
    ],
)
def test_what_cannot_be_evaluated_is_named(text: str, step: int | None, message: str) -> None:
    _run("run", steps={10: True, 20: False})
    _run("young", steps={})
    Path("empty").mkdir()
    Path("file").write_text("")
    with pytest.raises(SetupError, match=message):
        find_source(text, step=step)


@pytest.mark.parametrize("url", ["https://host/v1", "HTTP://[::1]:8000/v1", "http://h/v1/a@b"])
def test_a_url_is_that_of_an_api(url: str) -> None:
    assert find_source(url, api_model="m").url == url


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://host:99999/v1", "http://host:99999/v1 is no URL: Port out of range"),
        ("http://[::1/v1", r"http://\[::1/v1 is no URL: Invalid IPv6 URL; write https://HOST/v1"),
        ("http:///v1", "http:///v1 is no URL of a host"),
        ("http://ho st/v1", "http://ho st/v1 is no URL of a host"),
        ("http://user:secret@host/v1", "write http://host/v1, and set .* OPENAI_API_KEY"),
        ("http://user:sec/ret@host/v1", "write http://host/v1, and set .* OPENAI_API_KEY"),
    ],
)
def test_a_url_that_cannot_be_one_is_refused_and_no_password_shown(url: str, message: str) -> None:
    for api_model in ("m", None):
        with pytest.raises(SetupError, match=message) as refused:
            find_source(url, api_model=api_model)
        assert "sec" not in str(refused.value)
