"""The core times its sequences exactly, although it sends events after each step only."""

import itertools

import pytest
import torch

from treadle.rollout_server.engine import (
    ElementType,
    EngineEvent,
    Finished,
    Sampling,
    Started,
)
from treadle.rollout_server.engines.torch.core import EngineCore
from treadle.rollout_server.engines.torch.model import CachedModel, ModelSource
from treadle.rollout_server.engines.torch.testing.text_model import ModelDir, prompts, request


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_the_times_are_those_within_a_step(model_dir: ModelDir, max_tokens: int) -> None:
    ticks = itertools.count()
    source = ModelSource(path=model_dir(), dtype=ElementType.FLOAT32, device="cpu")
    with torch.inference_mode():
        core = EngineCore(
            CachedModel(source),
            max_num_seqs=2,
            prefix_cache_bytes=0,
            max_draft_tokens=0,
            batch_invariant=False,
            clock=lambda: float(next(ticks)),
        )
        events: list[EngineEvent | BaseException] = []
        sampling = Sampling(max_tokens=max_tokens, seed=1, ignore_eos=True)
        core.submit(core.new_sequence(request(prompts(1)[0], sampling), events.append))
        while core.runnable:
            core.step()
            for callback in core.take_outbox():
                callback()
    started, finished = events[0], events[-1]
    assert isinstance(started, Started) and isinstance(finished, Finished)
    # It read the clock when the sequence began, after the forward pass, and at the first token.
    assert started.since_s == 1
    assert finished.prefill_s == 2
