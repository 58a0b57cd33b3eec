"""The profile of some updates on one rank, as a Chrome trace for chrome://tracing or Perfetto.

An update is profiled whole: log-probabilities before it, forward and backward passes, the
optimizer. Others are not slowed down.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from treadle.policy.config.policy import ProfileConfig

_ACTIVITIES: Final = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA}


@contextmanager
def profiled(config: ProfileConfig, what: str, *, step: int, rank: int) -> Iterator[None]:
    """Profiles the block, if its first optimizer step is to be, and writes the trace.

    Args:
        what: Part of the trace's name; the policy and its critic count steps apart.
        step: Number of that step, the first of a run being 1.
    """
    if not config.covers(step):
        yield
        return
    assert config.directory is not None, "the driver has filled it in"
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    with profile(activities=[_ACTIVITIES[kind] for kind in kinds], record_shapes=True) as found:
        yield
        if "cuda" in kinds:
            torch.cuda.synchronize()
    config.directory.mkdir(parents=True, exist_ok=True)
    path = config.directory / f"{what}-step{step:06d}-rank{rank}.json.gz"
    found.export_chrome_trace(str(path))
    logging.getLogger(__name__).info("the profile of step %d is %s", step, path)
