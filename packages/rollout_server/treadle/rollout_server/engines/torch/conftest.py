from pathlib import Path

import pytest

from treadle.rollout_server.engines.torch.testing.text_model import ModelDir, write_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> ModelDir:
    """``model_dir("qwen2", seed=1)`` -> a directory that `from_pretrained` reads."""
    made: dict[tuple[str, int], Path] = {}

    def make(architecture: str = "qwen2", seed: int = 0) -> Path:
        key = (architecture, seed)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(f"{architecture}-{seed}")
            write_model(made[key], architecture, seed)
        return made[key]

    return make
