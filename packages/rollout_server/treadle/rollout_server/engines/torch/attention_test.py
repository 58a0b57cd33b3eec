from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from treadle.rollout_server.engines.torch import attention
from treadle.rollout_server.engines.torch.attention import RowSpan, StepLayout, cached_attention
from treadle.rollout_server.engines.torch.kv_cache import KvCache, KvCacheShape

HEADS, KV_HEADS, DIM = 4, 2, 8


def expected(
    query_THD: torch.Tensor,
    key_NKD: torch.Tensor,
    value_NKD: torch.Tensor,
    start: int,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Causal attention of one sequence, written as its definition."""
    repeat = HEADS // KV_HEADS
    key, value = (x.repeat_interleave(repeat, dim=1) for x in (key_NKD, value_NKD))
    out = torch.empty_like(query_THD)
    for t in range(len(query_THD)):
        visible = slice(0 if window is None else max(0, start + t + 1 - window), start + t + 1)
        scores = torch.einsum("hd,nhd->hn", query_THD[t], key[visible]) * 0.5
        scores = scores if softcap is None else softcap * (scores / softcap).tanh()
        out[t] = torch.einsum("hn,nhd->hd", scores.softmax(-1), value[visible])
    return out


def new_cache(length: int, *, is_exact: bool = True) -> KvCache:
    shape = KvCacheShape(
        num_layers=2,
        num_heads=KV_HEADS,
        head_dim=DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_rows=8,
        max_length=length,
        is_exact=is_exact,
    )
    cache = KvCache(shape)
    cache.reserve(8, length)
    return cache


def attend(
    cache: KvCache,
    spans: Sequence[tuple[int, int]],
    shared: int,
    query: torch.Tensor,
    new: torch.Tensor,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of queries ``[1, H, T, D]``, whose keys and values ``[2, T, K, D]`` are new."""
    step = StepLayout.build(
        cache,
        [RowSpan(*span) for span in spans],
        queries_per_head=HEADS // KV_HEADS,
        shared=shared,
    )
    module: Any = SimpleNamespace(layer_idx=1)
    query = torch.cat((query, query[:, :, -1:].expand(-1, -1, step.padding, -1)), 2)
    new = torch.cat((new, new[:, -1:].expand(-1, step.padding, -1, -1)), 1)
    key, value = (x.transpose(0, 1).unsqueeze(0) for x in new)
    out, _ = cached_attention(
        module,
        query,
        key,
        value,
        None,
        scaling=0.5,
        step=step,
        sliding_window=window,
        softcap=softcap,
    )
    return out


@pytest.mark.parametrize(
    ("window", "softcap"), [(None, None), (5, None), (None, 0.8), (5, 0.8)], ids=str
)
@pytest.mark.parametrize("call_cost", [0, 4096], ids=["many groups", "one group"])
@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("shared", [0, 130], ids=["nothing shared", "shared prefix"])
@pytest.mark.parametrize(
    "spans",
    [
        [(0, 1)],
        [(9, 10), (3, 4), (0, 1)],
        [(0, 5), (0, 5)],
        [(20, 21), (20, 21), (20, 21)],
        [(20, 21), (7, 8), (0, 12), (4, 7), (0, 1)],
        [(60, 61), (2, 3), (61, 62), (0, 30)],
        [(20, 21), (7, 8), (11, 12), (40, 41), (3, 4)],
        [(20, 23), (7, 8), (11, 17), (40, 42), (3, 4), (0, 90)],
    ],
)
def test_every_token_sees_its_own_sequence_up_to_itself(
    spans: list[tuple[int, int]],
    shared: int,
    call_cost: int,
    window: int | None,
    softcap: float | None,
    is_exact: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "_CALL_COST", call_cost)
    monkeypatch.setattr(attention, "_SHARED_CALL_COST", call_cost)
    torch.manual_seed(0)
    spans = [(start + shared, stop + shared) for start, stop in spans]
    cache = new_cache(256, is_exact=is_exact)
    full = [torch.randn(2, stop, KV_HEADS, DIM) for _, stop in spans]
    longest = max(full, key=lambda known: known.shape[1])
    for row, (start, stop) in enumerate(spans):
        full[row][:, :shared] = longest[:, : min(shared, stop)]
        for held, known in zip(cache.layer(1), full[row], strict=True):
            held[row] = 1e4  # Stale positions must not matter.
            held[row, :, :start] = known[:start].transpose(0, 1)
    new = torch.cat([known[:, start:] for known, (start, _) in zip(full, spans, strict=True)], 1)
    query = torch.randn(1, HEADS, new.shape[1], DIM)
    out = attend(cache, spans, shared, query, new, window, softcap)
    first = 0
    for (start, stop), known in zip(spans, full, strict=True):
        tokens = slice(first, first + stop - start)
        want = expected(
            query[0, :, tokens].transpose(0, 1), known[0], known[1], start, window, softcap
        )
        torch.testing.assert_close(out[0, tokens], want, rtol=1e-5, atol=1e-5)
        first = tokens.stop


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("softcap", [None, 0.8])
def test_the_bits_of_a_token_do_not_depend_on_its_step(
    window: int | None, softcap: float | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    length, common = 400, 150
    draws = Random(0)
    query = torch.randn(6, HEADS, length, DIM, generator=generator)
    known = torch.randn(6, 2, length, KV_HEADS, DIM, generator=generator)
    known[:, :, :common] = known[:1, :, :common]
    alone = [
        attend(new_cache(512), [(0, length)], 0, query[i : i + 1], known[i], window, softcap)[0]
        for i in range(6)
    ]
    cache, done = new_cache(512), 0
    while done < length:
        # All rows are at the same position, and read different numbers of tokens from there.
        sizes = [min(draws.choice([1, 1, 2, 5, 9, 80]), length - done) for _ in range(6)]
        spans = [(done, done + size) for size in sizes]
        queries = torch.cat([query[i, :, slice(*span)] for i, span in enumerate(spans)], 1)
        new = torch.cat([known[i, :, slice(*span)] for i, span in enumerate(spans)], 1)
        out = attend(cache, spans, common, queries.unsqueeze(0), new, window, softcap)[0]
        for i, (found, span) in enumerate(zip(out[: sum(sizes)].split(sizes), spans, strict=True)):
            assert torch.equal(found, alone[i][slice(*span)])
        done += draws.choice([1, min(sizes)])


def test_rows_are_grouped_unless_padding_costs_more_than_a_call() -> None:
    spans = [RowSpan(5000, 5001), *[RowSpan(200, 201)] * 63, RowSpan(0, 2000), RowSpan(199, 200)]
    assert attention._split(spans, 0) == [(0, 1), (1, 64), (64, 65), (65, 66)]
    assert attention._split([RowSpan(180 + i, 181 + i) for i in range(40)], 0) == [(0, 40)]
    long = [RowSpan(0, 300)] * 2
    assert attention._split(long, 0) == [(0, 2)]
    assert attention._split(long, 0, is_exact=True) == [(0, 1), (1, 2)]
