import atexit
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines.smollm2 import SmolUnavailable, smollm2
from engines.tiny_model import write_tiny_model
from engines.tiny_vision_model import write_tiny_vision_model

from treadle.conformance.contracts.remote_contract import Target
from treadle.rollout_server.testing.engine_command import engine_command
from treadle.rollout_server.testing.process import running_server

CONTEXT_LENGTH = "1024"
atexit.register(gc.freeze)  # Each file is a process with transformers: no last search for garbage.


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Writes two sets of weights of the tiny model."""
    first, second = (tmp_path_factory.mktemp(f"tiny-{seed}") for seed in (0, 1))
    return write_tiny_model(first, seed=0), write_tiny_model(second, seed=1)


@pytest.fixture(scope="session")
def tiny_qwen2_5_vl_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Writes two sets of weights of a tiny Qwen2.5-VL."""
    return _vision_models(tmp_path_factory, "qwen2_5_vl")


@pytest.fixture(scope="session")
def tiny_qwen3_vl_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Writes two sets of weights of a tiny Qwen3-VL."""
    return _vision_models(tmp_path_factory, "qwen3_vl")


def _vision_models(factory: pytest.TempPathFactory, family: str) -> tuple[Path, Path]:
    first, second = (factory.mktemp(f"{family}-{seed}") for seed in (0, 1))
    return (
        write_tiny_vision_model(first, family, seed=0),
        write_tiny_vision_model(second, family, seed=1),
    )


@pytest.fixture(scope="session")
def smollm2_models() -> tuple[Path, Path]:
    """Returns SmolLM2-135M-Instruct, and a copy whose weights differ by a few percent."""
    try:
        return smollm2(0), smollm2(1)
    except SmolUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """Starts one server per module, with the module's ENGINE, MODELS and ARGUMENTS."""
    engine: str = request.module.ENGINE
    command = engine_command(engine)
    models: tuple[Path, Path] = request.getfixturevalue(request.module.MODELS)
    settings = {
        "engine": engine,
        "model.path": str(models[0]),
        "model.context_length": CONTEXT_LENGTH,
        "model.num_threads": "1",
        "model.max_num_seqs": "8",
    }
    flags = [word for key, value in settings.items() for word in (f"--{key}", value)]
    with running_server(*flags, *request.module.ARGUMENTS, command=command) as server:
        yield Target(address=server.address, checkpoints=models, pid=server.popen.pid)
