"""Runs with one mistake each, found with the demo's files; servers' doctors are real processes."""

import json
import socket
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from treadle.tracing.diagnosis import Diagnosis, Level
from treadle.trainer.config.load import load_config
from treadle.trainer.demo import DEMO
from treadle.trainer.doctor.run import _room, check_settings
from treadle.trainer.launch.gpus import Gpu

_FEW = ("data.prompts_per_step=2", "data.max_val_rows=2")
_GPU = Gpu(
    index="0",
    uuid="GPU-aaaa",
    name="H200",
    memory_bytes=141 << 30,
    free_bytes=141 << 30,
    driver="570.1",
)
_FINDINGS = [
    {"check": "vllm", "level": "FAIL", "value": "0.31.0", "cause": "internals", "fix": "pip it"},
    {"check": "address", "level": "OK", "value": "127.0.0.1:0", "cause": "", "fix": ""},
]


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """A server's program in an environment whose doctor has two findings."""
    program = tmp_path / "server"
    program.write_text(
        f"#!{sys.executable}\n"
        "import json, sys\n"
        "if sys.argv[1] == 'doctor':\n"
        f"    assert sys.argv[2] == '--json' and '--model.path' in sys.argv, sys.argv\n"
        f"    print({json.dumps(_FINDINGS)!r}); sys.exit(1)\n"
        "print(*(f'--{key} ' for key in sys.argv))\n"
    )
    program.chmod(0o755)
    return program


def _check(
    *overrides: str, gpus: int = 0, environ: dict[str, str] | None = None
) -> list[Diagnosis]:
    return list(check_settings([], [*_FEW, *overrides], gpus=(_GPU,) * gpus, environ=environ or {}))


def _named(findings: list[Diagnosis], check: str) -> Diagnosis:
    (finding,) = [each for each in findings if each.check == check]
    return finding


def test_the_problems_of_a_dry_run_are_findings_and_so_are_those_of_the_server(
    server: Path,
) -> None:
    findings = _check(
        "reward.name=nope",
        "agent.parser=nope",
    )
    assert [f.level for f in findings] == [Level.FAIL]  # the configuration itself
    assert "agent.parser" in findings[0].value

    findings = _check(
        "reward.name=nope", "algorithm.advantage=nope", f"rollout.server_command=[{server}]"
    )
    wrong = [f.value for f in findings if f.check == "settings"]
    assert any("there is no reward 'nope'" in text for text in wrong)
    assert any("nope" in text and "advantage" in text for text in wrong)
    assert all(f.fix for f in findings if f.level is not Level.OK)
    vllm = _named(findings, "server: vllm")
    assert (vllm.level, vllm.value, vllm.fix) == (Level.FAIL, "0.31.0", "pip it")
    assert _named(findings, "server: address").level is Level.OK


def test_missing_settings_hide_no_other_problem() -> None:
    findings = _check("model.path=/nowhere")
    wrong = [f.value for f in findings if f.check == "settings"]
    assert any("data.train_files is required" in text for text in wrong)
    assert any("/nowhere does not exist" in text for text in wrong)


def test_a_program_that_is_no_server(tmp_path: Path) -> None:
    program = tmp_path / "server"
    program.write_text("#!/bin/sh\necho No module named treadle >&2; exit 1\n")
    program.chmod(0o755)
    finding = _named(_check(f"rollout.server_command=[{program}]"), "server")
    assert finding.level is Level.FAIL
    assert "No module named treadle" in finding.value


def test_rows_that_an_older_library_datasets_cannot_load(
    tmp_path: Path, server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        json.loads(line)
        for line in (DEMO.parent / "train.jsonl").read_text(encoding="utf-8").splitlines()[:4]
    ]
    features = {"info": {"features": {"prompt": {"feature": {}, "_type": "List"}}}}
    table = pyarrow.Table.from_pylist(rows)
    file = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(
        table.replace_schema_metadata({"huggingface": json.dumps(features)}), file
    )
    overrides = (f"data.train_files={file}", f"rollout.server_command=[{server}]")
    assert all(f.check != "datasets" for f in _check(*overrides))

    information = tmp_path / "datasets-2.21.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: datasets\nVersion: 2.21.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = _named(_check(*overrides), "datasets")
    assert finding.level is Level.WARN
    assert str(file) in finding.value
    assert "Feature type 'List' not found" in finding.cause


def test_gpus_memory_pools_keys_and_ports(server: Path, tmp_path: Path) -> None:
    command = f"rollout.server_command=[{server}]"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        findings = _check(
            command,
            "policy.parallel.data=2",
            "rollout.num_replicas=2",
            "run.loggers=[wandb]",
            f"run.metrics_port={port}",
            gpus=2,
        )
    assert _named(findings, "number of GPUs").level is Level.WARN
    assert "rollout.release_memory=true" in _named(findings, "number of GPUs").fix
    assert "WANDB_API_KEY" in _named(findings, "key of W&B").fix
    occupied = _named(findings, "run.metrics_port")
    assert (occupied.level, occupied.value) == (Level.FAIL, f"127.0.0.1:{port}")
    assert "Address already in use" in occupied.cause

    findings = _check(
        command,
        "policy.parallel.data=2",
        "rollout.num_replicas=2",
        "rollout.release_memory=true",
        "run.loggers=[wandb]",
        "run.metrics_port=0",
        gpus=2,
        environ={
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "WANDB_API_KEY": "k",
        },
    )
    assert _named(findings, "number of GPUs").level is Level.OK
    assert _named(findings, "PYTORCH_CUDA_ALLOC_CONF").level is Level.FAIL
    assert _named(findings, "key of W&B").level is Level.OK
    assert _named(findings, "run.metrics_port").level is Level.OK


def test_a_machine_without_gpus_is_named_where_the_run_needs_some(server: Path) -> None:
    findings = _check(f"rollout.server_command=[{server}]", "launch.gpus_per_node=8")
    finding = _named(findings, "number of GPUs")
    assert finding.level is Level.FAIL
    assert finding.value == "launch.gpus_per_node=8, and this machine has none"


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("launch.nodes=2", "launch.gpus_per_node=8"), "16 of 12"),
        (("launch=ray", "rollout.num_replicas=12", "launch.gpus_per_replica=2"), "24 of 12"),
    ],
)
def test_a_cluster_with_too_few_gpus(arguments: tuple[str, ...], wanted: str) -> None:
    config = load_config([DEMO], arguments).config
    found = {each.check: each for each in _room(config, {"CPU": 64.0, "GPU": 12.0})}
    assert found["CPUs of the cluster"].level is Level.OK
    gpus = found["GPUs of the cluster"]
    assert (gpus.level, gpus.value) == (Level.FAIL, wanted)
