from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.rollout_server.engine import Sampling
from treadle.rollout_server.engines.common.sampling import SamplingBatch
from treadle.rollout_server.engines.sglang.sampling import LateMasks, Rows, SampledRow, to_wire

VOCAB = 40
CPU = torch.device("cpu")
SETTINGS = st.builds(
    Sampling,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.0, 1e-30, 0.5, 1.0, 3.0]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([None, 1, 3, VOCAB, 1000]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3, 1e9]),
)
IDS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)
SEEDS = st.integers(0, 2**64 - 1)


def row(sampling: Sampling, seed: int, history: list[int], *, masked: bool = False) -> SampledRow:
    wire = to_wire(sampling, seed, masked=masked)
    return SampledRow(wire, history, vocab_size=VOCAB, device=CPU)


def logits(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, VOCAB, generator=generator) * 3


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_it_draws_step_by_step_what_the_embedded_engine_draws(data: Any) -> None:
    wanted = data.draw(st.lists(SETTINGS, min_size=1, max_size=6))
    seeds = [data.draw(SEEDS) for _ in wanted]
    histories = [data.draw(IDS) for _ in wanted]
    masked = [data.draw(st.booleans()) for _ in wanted]
    rows = Rows(
        [
            row(one, seed, history, masked=mask)
            for one, seed, history, mask in zip(wanted, seeds, histories, masked, strict=True)
        ]
    )
    embedded = SamplingBatch(wanted, seeds, CPU, masked)
    for step in range(3):
        scores = logits(len(wanted), data.draw(st.integers(0, 1000)) + step)
        theirs = embedded.sample(scores.clone(), histories)
        ours = rows.draw(scores.clone())
        assert ours.ids_B.tolist() == theirs.token_ids
        assert (ours.kept is None) is (not any(masked))
        if ours.kept is not None:
            late = LateMasks(ours.kept, ours.ids_B)
            assert [late[place] for place in range(len(wanted))] == theirs.masks
        assert ours.logprobs_B.tolist() == pytest.approx(theirs.logprobs, abs=1e-5)
        for history, token_id in zip(histories, theirs.token_ids, strict=True):
            history.append(token_id)


def test_a_row_goes_on_alike_in_other_batches() -> None:
    """As when sequences join and leave."""
    sampling = Sampling(max_tokens=1, temperature=0.7, repetition_penalty=1.5)
    scores = [logits(1, step) for step in range(3)]
    alone = Rows([row(sampling, 7, [1, 2])])
    wanted = [int(alone.draw(one.clone()).ids_B) for one in scores]

    moving = Rows([row(sampling, 7, [1, 2])])
    drawn = [int(moving.draw(scores[0].clone()).ids_B)]
    moving = Rows([row(Sampling(max_tokens=1), 3, [5])]).joined(moving)
    drawn.append(int(moving.draw(torch.cat([logits(1, 9), scores[1]])).ids_B[1]))
    moving = moving.kept([1])
    drawn.append(int(moving.draw(scores[2].clone()).ids_B))
    assert drawn == wanted


def test_a_row_made_anew_goes_on_where_its_history_ends() -> None:
    """As when a sequence was taken off the device in between."""
    sampling = Sampling(max_tokens=1, repetition_penalty=2.0)
    rows = Rows([row(sampling, 7, [1, 2])])
    first = int(rows.draw(logits(1, 0)).ids_B)
    again = Rows([row(sampling, 7, [1, 2, first])])
    assert rows.draw(logits(1, 1)).ids_B.tolist() == again.draw(logits(1, 1)).ids_B.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_show_in_the_logprob(temperature: float, value: float) -> None:
    rows = Rows([row(Sampling(max_tokens=1, temperature=temperature), 0, [1])])
    scores = logits(1)
    scores[0, 3] = value
    drawn = rows.draw(scores)
    assert drawn.logprobs_B.isnan().all() and 0 <= int(drawn.ids_B) < VOCAB


def test_logits_of_half_precision_are_drawn_from_in_full() -> None:
    rows = Rows([row(Sampling(max_tokens=1), 0, [1])])
    assert rows.draw(logits(1).bfloat16()).logprobs_B.dtype is torch.float32
