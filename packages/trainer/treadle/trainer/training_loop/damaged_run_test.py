"""Every way to damage a run directory: the command continues with a note, or ends with one."""

import asyncio
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from treadle.agent_loop import SetupError
from treadle.trainer.checkpoint.begin_or_resume import ResumePoint, find_resume_point
from treadle.trainer.checkpoint.run_directory import (
    CHECKPOINTS,
    CRITIC,
    HF,
    POLICY,
    Checkpoints,
    RunDirectory,
    RunDirectoryError,
)
from treadle.trainer.config.load import load_config
from treadle.trainer.demo import DEMO
from treadle.trainer.evaluation.source import Source, find_source
from treadle.trainer.main import main
from treadle.trainer.model_source import resolve_model

_NEWEST, _OLDER = "step-00000002", "step-00000001"
Damage = Callable[[Path], object]


async def _write(directory: Path) -> None:
    """Writes files with the names that those of policy and critic have, and something in them."""

    def write() -> None:
        for name in ("__0_0.distcp", ".metadata", "common.pt", "metadata.json"):
            for part in (POLICY, CRITIC):
                _file(directory / part / name, f"{directory.name} {name} " * 500)
        _file(directory / HF / "config.json", "{}")
        _file(directory / HF / "model.safetensors", "weights " * 500)

    await asyncio.to_thread(write)


def _file(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two steps, each with a checkpoint."""
    run = tmp_path / "run"
    run.mkdir()
    config = load_config([DEMO], ["schedule.total_steps=1"]).config.model_dump(mode="json")
    (run / "config.json").write_text(json.dumps(config))
    checkpoints = Checkpoints(run / CHECKPOINTS, keep=2)
    for step in (1, 2):
        asyncio.run(checkpoints.save(step, {"reward/mean": 0.5}, _write))
    lines = [{"step": step, "reward/mean": step / 10, "time/save_s": 0.1} for step in (0, 1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def _train(run: Path, *arguments: str) -> int:
    """Resumes the run. Both of its checkpoints have reached its end, so it starts no process."""
    return main([f"run.dir={run}", f"--config={DEMO}", "schedule.total_steps=1", *arguments])


def _find(run: Path, *arguments: str) -> ResumePoint:
    """Returns where the run continues."""
    config = load_config([DEMO], ["schedule.total_steps=1", *arguments]).config
    return find_resume_point(RunDirectory(run), Checkpoints(run / CHECKPOINTS, keep=2), config)


def _delete(name: str) -> Damage:
    return lambda run: (run / name).unlink()


def _cut(name: str) -> Damage:
    return lambda run: (run / name).write_bytes((run / name).read_bytes()[:-20])


def _flip(name: str) -> Damage:
    def flip(run: Path) -> None:
        data = bytearray((run / name).read_bytes())
        data[len(data) // 2] ^= 0x40
        (run / name).write_bytes(data)

    return flip


def _put(name: str, text: str) -> Damage:
    return lambda run: (run / name).write_text(text)


def _replace_by_folder(name: str) -> Damage:
    def replace(run: Path) -> None:
        (run / name).unlink()
        (run / name).mkdir()

    return replace


def _mixed(run: Path) -> None:
    tensors = f"{POLICY}/__0_0.distcp"
    shutil.copy(run / CHECKPOINTS / _OLDER / tensors, run / CHECKPOINTS / _NEWEST / tensors)


def _both(first: Damage, second: Damage) -> Damage:
    return lambda run: [damage(run) for damage in (first, second)]


def _empty(run: Path) -> None:
    shutil.rmtree(run / _AT)
    (run / _AT).mkdir()


def _without_checkpoints(run: Path) -> None:
    shutil.rmtree(run / CHECKPOINTS)
    (run / CHECKPOINTS).write_text("")


def _damaged_line(run: Path) -> None:
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("1,", "1;"))


_AT = f"{CHECKPOINTS}/{_NEWEST}"
_TENSORS = f"{_AT}/{POLICY}/__0_0.distcp"
_COMMON = f"{_AT}/{POLICY}/common.pt"
_STATE = f"{_AT}/state.json"
_POINTER = f"{CHECKPOINTS}/latest"

_FALLS_BACK: dict[str, tuple[Damage, str]] = {
    "tensors deleted": (_delete(_TENSORS), "policy/__0_0.distcp is missing"),
    "tensors cut": (_cut(_TENSORS), "bytes, and "),
    "tensors flipped": (_flip(_TENSORS), "the content of policy/__0_0.distcp has changed"),
    "tensors empty": (_put(_TENSORS, ""), "policy/__0_0.distcp has 0 bytes"),
    "tensors a folder": (_replace_by_folder(_TENSORS), "policy/__0_0.distcp is missing"),
    "tensors of another step": (_mixed, "the content of policy/__0_0.distcp has changed"),
    "common.pt deleted": (_delete(_COMMON), "policy/common.pt is missing"),
    "common.pt cut": (_cut(_COMMON), "policy/common.pt has"),
    "common.pt flipped": (_flip(_COMMON), "the content of policy/common.pt has changed"),
    ".metadata deleted": (_delete(f"{_AT}/{POLICY}/.metadata"), "policy/.metadata is missing"),
    ".metadata flipped": (_flip(f"{_AT}/{POLICY}/.metadata"), "policy/.metadata has changed"),
    "metadata.json deleted": (_delete(f"{_AT}/{POLICY}/metadata.json"), "metadata.json is missing"),
    "critic flipped": (
        _flip(f"{_AT}/{CRITIC}/__0_0.distcp"),
        "the content of critic/__0_0.distcp has changed",
    ),
    "critic deleted": (lambda run: shutil.rmtree(run / _AT / CRITIC), "is missing"),
    "policy deleted": (lambda run: shutil.rmtree(run / _AT / POLICY), "is missing"),
    "state.json deleted": (_delete(_STATE), "state.json is missing"),
    "state.json {}": (_put(_STATE, "{}"), "state.json has 2 bytes"),
    "state.json flipped": (_flip(_STATE), "the content of state.json has changed"),
    "manifest deleted": (_delete(f"{_AT}/manifest.json"), "manifest.json is missing"),
    "manifest cut": (_cut(f"{_AT}/manifest.json"), "manifest.json is damaged"),
    "manifest a list": (_put(f"{_AT}/manifest.json", "[]"), "manifest.json is damaged"),
    "manifest {}": (_put(f"{_AT}/manifest.json", '{"files": {}}'), "it names no file"),
    "everything deleted": (
        _empty,
        "state.json cannot be read: No such file",
    ),
}


@pytest.mark.parametrize(("damage", "said"), _FALLS_BACK.values(), ids=_FALLS_BACK.keys())
def test_a_run_goes_on_from_the_newest_whole_checkpoint(
    run: Path, damage: Damage, said: str
) -> None:
    damage(run)
    found = _find(run)
    assert found.first_step == 2
    note, resuming = found.notes
    assert f"{_NEWEST} cannot be used: " in note
    assert said in note
    assert resuming.startswith("resuming after step 1 (")


_GOES_ON: dict[str, tuple[Damage, str]] = {
    "nothing": (lambda run: None, ""),
    "latest deleted": (_delete(_POINTER), f"{_POINTER} is missing"),
    "latest empty": (_put(_POINTER, ""), "names '', and there is no such checkpoint"),
    "latest to nothing": (_put(_POINTER, "step-00000007\n"), "names 'step-00000007', and there is"),
    "latest out of the folder": (_put(_POINTER, "../..\n"), "names '../..', and there is no"),
    "latest binary": (lambda run: (run / _POINTER).write_bytes(b"\xff\xfe\0"), "cannot be read"),
    "latest a folder": (_replace_by_folder(_POINTER), "latest cannot be read"),
    "config.json deleted": (_delete("config.json"), "config.json is missing; the settings were"),
    "config.json cut": (_cut("config.json"), "config.json is damaged"),
    "config.json a list": (_put("config.json", "[]"), "config.json is damaged: it holds no JSON"),
    "metrics.jsonl deleted": (_delete("metrics.jsonl"), ""),
    "the older checkpoint damaged": (_flip(f"{CHECKPOINTS}/{_OLDER}/state.json"), ""),
    "the critic of the older checkpoint damaged": (
        _flip(f"{CHECKPOINTS}/{_OLDER}/{CRITIC}/common.pt"),
        "",
    ),
    "the exported model damaged": (_flip(f"{_AT}/{HF}/model.safetensors"), ""),
}


@pytest.mark.parametrize(("damage", "said"), _GOES_ON.values(), ids=_GOES_ON.keys())
def test_a_run_goes_on_where_the_newest_checkpoint_is_whole(
    run: Path, damage: Damage, said: str
) -> None:
    damage(run)
    found = _find(run)
    assert found.first_step == 3
    assert said in "\n".join(found.notes)
    assert len(found.notes) == (2 if said else 1)


def _logs_deleted(run: Path) -> None:
    for name in ("metrics.jsonl", "config.json", _POINTER):
        (run / name).unlink()


def _logs_damaged(run: Path) -> None:
    _damaged_line(run)
    _put("config.json", "[]")(run)
    _put("status.json", "{")(run)


@pytest.mark.parametrize(
    ("damage", "step", "said"),
    [
        (_flip(_TENSORS), 1, ("the content of policy/__0_0.distcp has changed since it was",)),
        (_cut("metrics.jsonl"), 2, ()),
        (_logs_deleted, 2, ("config.json is missing", f"{_POINTER} is missing")),
        (_logs_damaged, 2, ("config.json is damaged", "metrics.jsonl, line 2 is damaged")),
    ],
    ids=["tensors flipped", "metrics cut", "logs deleted", "logs damaged"],
)
def test_the_command_goes_on_with_a_note(
    run: Path,
    capfd: pytest.CaptureFixture[str],
    damage: Damage,
    step: int,
    said: tuple[str, ...],
) -> None:
    damage(run)
    assert _train(run) == 0
    words = " ".join("".join(capfd.readouterr()).split())
    assert "Traceback" not in words
    for text in (*said, f"resuming after step {step} ("):
        assert text in words
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == step
    assert json.loads((run / "config.json").read_text())["run"]["seed"] == 0


def test_the_command_sets_a_run_back(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _train(run, f"run.resume={run / CHECKPOINTS / _OLDER}") == 0
    assert "set back to step 1: later steps are trained again" in "".join(capfd.readouterr())
    assert (run / _POINTER).read_text() == f"{_OLDER}\n"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]


_ENDS: dict[str, tuple[Damage, tuple[str, ...], str]] = {
    "all checkpoints damaged": (
        _both(_flip(_TENSORS), _delete(f"{CHECKPOINTS}/{_OLDER}/{POLICY}/common.pt")),
        (),
        "holds no checkpoint to resume from",
    ),
    "all checkpoints deleted": (
        lambda run: shutil.rmtree(run / CHECKPOINTS),
        (),
        "saved a checkpoint at step 2, and",
    ),
    "checkpoints a file": (
        _without_checkpoints,
        (),
        "saved a checkpoint at step 2, and",
    ),
    "config.json deleted, another seed": (
        _delete("config.json"),
        ("run.seed=5",),
        "run.seed was 0 and is 5",
    ),
    "metrics.jsonl deleted, another seed": (
        _delete("metrics.jsonl"),
        ("run.seed=5",),
        "run.seed was 0 and is 5",
    ),
    "config.json deleted, never to resume": (
        _delete("config.json"),
        ("run.resume=never",),
        "already holds a run and run.resume=never",
    ),
    "no copy of config.json": (
        _both(_delete("config.json"), lambda run: shutil.rmtree(run / CHECKPOINTS)),
        (),
        "config.json is missing, and no checkpoint has a copy",
    ),
    "a checkpoint of a later release": (
        _both(_delete(f"{_AT}/manifest.json"), _put(_STATE, '{"format": 9}')),
        (),
        "has checkpoint format 9, this release reads up to 2",
    ),
}


@pytest.mark.parametrize(("damage", "arguments", "said"), _ENDS.values(), ids=_ENDS.keys())
def test_a_run_that_cannot_go_on_says_why(
    run: Path, damage: Damage, arguments: tuple[str, ...], said: str
) -> None:
    damage(run)
    with pytest.raises(RunDirectoryError) as caught:
        _find(run, *arguments)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_ends_with_a_sentence_and_changes_nothing(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damage, _, said = _ENDS["all checkpoints damaged"]
    damage(run)
    before = _contents(run)
    assert _train(run) == 2
    err = capfd.readouterr().err
    assert said in err
    assert "Traceback" not in err
    assert _contents(run) == before


def _contents(run: Path) -> dict[Path, bytes]:
    return {
        path: path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path.name != "lock" and "logs" not in path.parts
    }


def test_a_checkpoint_of_release_0_1_is_used_and_said_to_be_unchecked(run: Path) -> None:
    state = json.loads((run / _STATE).read_text())
    (run / _STATE).write_text(json.dumps({**state, "format": 1}))
    (run / _AT / "manifest.json").unlink()
    (run / _AT / "config.json").unlink()
    (note,) = _find(run).notes
    assert note.startswith("resuming after step 2; its checkpoint is of release 0.1")


def _evaluated(path: Path, step: int | None = None) -> Source:
    return find_source(str(path), step=step)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_flip(f"{_AT}/{HF}/model.safetensors"), "the content of hf/model.safetensors has changed"),
        (_delete(f"{_AT}/{HF}/config.json"), "hf/config.json is missing"),
        (_put(_STATE, "{}"), "state.json has 2 bytes"),
    ],
)
def test_a_model_that_is_damaged_is_neither_exported_nor_trained_from(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: Damage, said: str
) -> None:
    damage(run)
    assert _evaluated(run, step=1).step == 1
    refused = f"{_NEWEST} cannot be used: {said}"
    whole = f"The newest whole one is {run / CHECKPOINTS / _OLDER}"
    assert main(["export", str(run), str(tmp_path / "out")]) == 2
    err = capfd.readouterr().err
    assert refused in err
    assert whole in err
    assert not (tmp_path / "out").exists()
    uses: tuple[Callable[[Path], object], ...] = (resolve_model, _evaluated)
    for use, source in itertools.product(uses, (run, run / _AT)):
        with pytest.raises(SetupError) as caught:
            use(source)
        assert refused in str(caught.value)
        assert whole in str(caught.value)


def test_a_lost_pointer_or_configuration_does_not_hinder_an_export(
    run: Path, tmp_path: Path
) -> None:
    (run / _POINTER).unlink()
    (run / "config.json").write_text("[]")
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").read_text().startswith("weights")
