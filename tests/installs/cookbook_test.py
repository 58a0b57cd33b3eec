"""Recipes of Tinker's cookbook, as they come from the index, against `treadle serve`.

`docs/serve.md` has what the other recipes did, and the cookbook's renderers beside ours.
`cookbook_data.py` makes what the recipes ask the hub for.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from chat_templates.cookbook import make_table
from e2e.served import KEY, ServeProcess
from installs.cookbook_data import make_data
from installs.foreign import ROOT, environment, install_torch, make_venv, run
from treadle.trainer.model_source import resolve_model

NAME = "Qwen/Qwen3-4B-Instruct-2507"
"""A model of which the cookbook has the renderer."""
DATA = os.environ.get("TREADLE_TEST_DATA")


def make_model(folder: Path) -> Path:
    """Writes a model of two layers that has learned nothing, with the demo's tokenizer."""
    demo = resolve_model("demo:calculator")
    config = AutoConfig.from_pretrained(demo)
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[:2]
    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM.from_config
    model = make(config, dtype=torch.float32)
    # So long that adapters alone can make any token likely.
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.2)
    weights = shutil.ignore_patterns("*.safetensors", "config.json")
    shutil.copytree(demo, folder, ignore=weights)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def cookbook(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the commands of an environment with the cookbook."""
    place = tmp_path_factory.mktemp("cookbook")
    bin_folder = make_venv(place / "venv", programs)
    env = install_torch(bin_folder, programs)
    pip: list[str | Path] = [programs / "uv", "pip", "install", "-q"]
    # 0.6.1 asks for a release of tml-renderers that the index may not have, and reads it for
    # Inkling alone.
    run([*pip, "tinker-cookbook==0.5.8", "pylatexenc", "sympy", "math-verify"], cwd=place, env=env)
    run([*pip, "--no-deps", "tinker-cookbook==0.6.1"], cwd=place, env=env)
    return bin_folder


@pytest.mark.skipif(DATA is None, reason="TREADLE_TEST_DATA names no folder with chat_templates")
def test_the_page_says_where_the_renderers_differ_from_the_templates(cookbook: Path) -> None:
    table = make_table(Path(str(DATA)), cookbook / "python")
    assert table in (ROOT / "docs/serve.md").read_text(encoding="utf-8")


def test_supervised_and_reinforcement_loops_run_to_their_end_and_learn(
    programs: Path, cookbook: Path, tmp_path: Path
) -> None:
    model, data = make_model(tmp_path / "model"), tmp_path / "data"
    make_data(data, model, NAME)
    settings = ("policy.backend=fsdp", "--name", NAME)
    service = ServeProcess(tmp_path / "serve" / "state", *settings, model=str(model))
    env = environment(cookbook, programs) | {
        "TINKER_API_KEY": KEY,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hf"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }

    def recipe(name: str, log: str, *arguments: str) -> list[dict[str, Any]]:
        """Runs a recipe to its end; returns the lines of its metrics."""
        common = (f"base_url={service.base_url}", f"model_name={NAME}", "lora_rank=16")
        module = f"tinker_cookbook.recipes.{name}"
        command: list[str | Path] = [cookbook / "python", "-m", module, *common]
        command += [f"log_path={tmp_path / log}", *arguments]
        run(command, cwd=data, env=env)
        lines = (tmp_path / log / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    supervised = recipe(
        "sl_loop",
        "sl",
        *("batch_size=16", "learning_rate=6e-3", "max_length=1000"),
        "train_on_what=last_assistant_message",
    )
    losses = [line["train_mean_nll"] for line in supervised]
    assert len(losses) == 32 and losses[-1] < 1.0 < 10.0 < losses[0], losses
    # rl_loop goes on from the last checkpoint of its log_path: here, what was just trained.
    *_, last = (tmp_path / "sl" / "checkpoints.jsonl").read_text().splitlines()
    (tmp_path / "rl").mkdir()
    resumed = re.sub(r'"batch": \d+', '"batch": 0', last)
    (tmp_path / "rl" / "checkpoints.jsonl").write_text(f"{resumed}\n")
    reinforced = recipe(
        "rl_loop",
        "rl",
        *("batch_size=8", "group_size=8", "learning_rate=4e-4", "max_tokens=12", "max_steps=8"),
        "loss_fn=importance_sampling",  # the default one is not there
    )
    rewards = [line["reward/total"] for line in reinforced]
    assert len(rewards) == 8 and sum(rewards[-3:]) / 3 > rewards[0] + 0.2, rewards
    service.process.terminate()
    assert service.process.wait() == 0
