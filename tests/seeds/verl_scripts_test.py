"""The arguments of verl's own scripts, of two releases: which give a plan, and why others do not.

`build-support/record_verl_scripts.py` recorded them. Relative paths in them are not read here: only
the settings are loaded, as `treadle --print-config` does.
"""

import gzip
import json
import re
from pathlib import Path

import pytest

from treadle.trainer.config.load import ConfigError, load_config

_SCRIPTS = Path(__file__).parent / "verl_scripts"
_PAGE = Path(__file__).parents[2] / "docs" / "coming_from_verl.md"

# What Treadle cannot do, as its refusals begin: everything else that refuses a script is a mistake.
_CANNOT = (
    r"reward_model\.enable=True is not available",  # a scalar reward model
    r"reward_model\.(reward_manager|reward_kwargs\.\w+|sandbox_fusion\.)",  # classes of verl
    r"actor_rollout_ref\.model\.override_config\.",  # the model is what its folder says
    r"rollout\.tensor_model_parallel_size=\d+ x .* a server's GPUs are on one node",
    r"\d+ GPUs do not divide into groups of \d+",  # more nodes than the script's default
    r"policy\.parallel: expert=\d+ does not divide",
    r"(actor_rollout_ref\.actor|critic)\.optim\.lr_warmup_steps_ratio: .* unknown number of steps",
    r"\S+\.(dtype: 'float16'|fp8\w*=\w+) is not available|rollout\.dtype=float16: must be",
    r"actor_rollout_ref\.rollout\.(expert_parallel_size|over_sample_rate|multi_turn\.num_repeat)",
    r"actor_rollout_ref\.actor\.router_replay\.mode: 'R2'",
    r"actor_rollout_ref\.rollout\.agent\.agent_loop_config_path: .*No such file",
    r"actor_rollout_ref\.model\.(exclude_modules|lora\.lora_A_init_method|torch_dtype)=",
    r"algorithm\.(use_pf_ppo|rollout_correction\.rollout_is_batch_normalize)=True",
    r"algorithm\.rollout_correction\.rollout_(rs_threshold_lower|token_veto_threshold)=",
    r"algorithm: lam=0\.95 weights the differences of advantage=gae",
    r"data\.sampler\.|trainer\.rl_logging_board_dir|critic\.model\.lora\.",
    r"policy\.lora: path=\S+ needs the rank of that adapter",
)
# Mistakes of the scripts, which verl refuses too: a stray argument, an unset variable.
_BROKEN = re.compile(r"'\s*\\*' is not key=value|launch\.\w+=: must be an integer")


def _refusals(arguments: list[str]) -> list[str]:
    """Returns what refuses a command line; empty if it gives a plan."""
    settings = [each for each in arguments if not each.startswith("--config")]
    try:
        load_config([], settings)
    except ConfigError as error:
        found = re.sub(r"(?m)^\s*\d+\. ", "", str(error)).splitlines()
        return [line for line in found if not re.fullmatch(r"\d+ problems", line)]
    return []


@pytest.mark.parametrize("release", ["0.5.0", "0.7.0"])
def test_a_script_gives_a_plan_or_is_refused_for_what_treadle_cannot_do(release: str) -> None:
    recorded = json.loads(gzip.decompress((_SCRIPTS / f"{release}.json.gz").read_bytes()))
    plans, unclear, broken = 0, {}, 0
    for script, (arguments, *_) in recorded.items():
        refused = _refusals(arguments)
        broken += any(map(_BROKEN.match, refused))
        plans += not refused
        if other := [
            line
            for line in refused
            if not _BROKEN.match(line) and not any(re.match(each, line) for each in _CANNOT)
        ]:
            unclear[script] = other
    assert unclear == {}
    row = f"| {release} | {len(recorded)} | {plans} | {len(recorded) - plans - broken} | {broken} |"
    assert row in _PAGE.read_text(encoding="utf-8")
