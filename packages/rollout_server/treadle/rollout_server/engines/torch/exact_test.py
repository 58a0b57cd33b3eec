"""In an exact cache, a whole model gives a token the same bits in every step."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
import torch

from treadle.rollout_server.engine import ElementType
from treadle.rollout_server.engines.torch.attention import RowSpan, StepLayout
from treadle.rollout_server.engines.torch.kv_cache import KvCache
from treadle.rollout_server.engines.torch.model import CachedModel, ModelSource
from treadle.rollout_server.engines.torch.testing import text_model

ROWS, LENGTH = 5, 150
# Steps are long enough that torch uses several threads for an activation.
SIZES = {
    "vocab_size": 203,
    "hidden_size": 96,
    "intermediate_size": 509,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def read(
    model: CachedModel, cache: KvCache, ids: Sequence[Sequence[int]], spans: Sequence[RowSpan]
) -> list[torch.Tensor]:
    """Reads spans of rows in one step; returns the logits of each, ``[its tokens, vocab]``."""
    step = StepLayout.build(
        cache, spans, queries_per_head=model.queries_per_head, shared=LENGTH // 2
    )
    flat = [i for row, span in zip(ids, spans, strict=True) for i in row[slice(*span)]]
    logits = model.forward(flat, step, range(len(flat)))
    return list(logits.split([span.num_tokens for span in spans]))


@pytest.mark.parametrize(
    ("architecture", "threads"),
    [("qwen2", 1), ("qwen2", 2), ("qwen2", 3), ("gemma2", 3), ("phi3", 1)],
    indirect=["threads"],
)
def test_the_bits_of_a_token_do_not_depend_on_its_step_or_the_width_of_a_layer(
    architecture: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in SIZES.items():
        monkeypatch.setitem(text_model._SIZES, name, size)
    text_model.write_model(tmp_path, architecture, 0)
    model = CachedModel(ModelSource(path=tmp_path, dtype=ElementType.FLOAT32, device="cpu"))
    draws = Random(threads)
    common = [draws.randrange(200) for _ in range(LENGTH // 2)]
    ids = [
        common + [draws.randrange(200) for _ in range(LENGTH - len(common))] for _ in range(ROWS)
    ]

    def empty() -> KvCache:
        cache = model.new_cache(max_rows=ROWS, is_exact=True)
        assert isinstance(cache, KvCache)
        cache.reserve(ROWS, LENGTH)
        return cache

    with torch.inference_mode():
        alone = []
        for row in ids:
            cache = empty()
            steps = [RowSpan(i, i + 10) for i in range(0, LENGTH, 10)]
            alone.append(torch.cat([read(model, cache, [row], [step])[0] for step in steps]))
        cache, done = empty(), 0
        while done < LENGTH:
            # All rows are at the same position, and read different numbers of tokens from there.
            least = draws.choice([1, 20])
            stops = [min(done + least + draws.choice([0, 2, 30, 60]), LENGTH) for _ in ids]
            spans = [RowSpan(done, stop) for stop in stops]
            for found, want, span in zip(read(model, cache, ids, spans), alone, spans, strict=True):
                assert torch.equal(found, want[slice(*span)])
            done += least
