"""The colour of a series, which depends on its name alone: the same in every run and picture."""

from __future__ import annotations

import colorsys
import zlib
from types import MappingProxyType

Colour = tuple[float, float, float]
"""Red, green and blue, 0 to 1."""

# Degrees. Those that share a panel are far apart; any other name gets one from its checksum.
_HUES = MappingProxyType(
    {
        "reward/mean": 212,
        "reward/min": 180,
        "reward/max": 255,
        "tool/call_rate": 22,
        "val/reward": 145,
        "val/accuracy": 165,
        "val/tool_call_rate": 50,
        "actor/ppo_kl": 212,
        "rollout/kl": 22,
        "actor/kl_loss": 145,
        "groups/dropped": 300,
        "rollout/num_failed": 0,
        "val/num_failed": 40,
        "time/rollout_s": 212,
        "time/train_s": 24,
        "time/sync_s": 145,
        "time/validate_s": 280,
        "time/save_s": 52,
        "time/release_s": 185,
        "time/step_s": 330,
        "servers/time_share/prefill": 185,
        "servers/time_share/decode": 212,
        "servers/time_share/tools": 24,
        "servers/time_share/training": 330,
        "servers/time_share/prompts": 52,
        "servers/time_share/weights": 145,
        "servers/time_share/memory": 280,
        "servers/time_share/down": 0,
        "policy/time_share/receive": 185,
        "policy/time_share/train": 212,
        "policy/time_share/optimizer": 235,
        "policy/time_share/logprobs": 255,
        "policy/time_share/weights": 145,
        "policy/time_share/save": 100,
        "policy/time_share/memory": 280,
        "policy/time_share/start": 0,
        "policy/time_share/rollout": 24,
        "policy/time_share/validation": 330,
        "policy/time_share/driver": 52,
    }
)


def hue(name: str) -> int:
    """Returns the hue of a metric in degrees."""
    return _HUES.get(name, zlib.crc32(name.encode(errors="replace")) % 360)


def rgb(name: str) -> Colour:
    """Returns the colour of a metric on a white ground."""
    return colorsys.hls_to_rgb(hue(name) / 360, 0.45, 0.5)
