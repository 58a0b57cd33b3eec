import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.rollout_server.engine import Sampling
from treadle.rollout_server.engines.common.sampling import SampledTokens, SamplingBatch, uniform
from treadle.rollout_server.sampling_mask import decode

CPU = torch.device("cpu")


def draw(logits: torch.Tensor, settings: list[Sampling], *, position: int = 3) -> SampledTokens:
    seeds = [s.seed or 0 for s in settings]
    histories = [[0] * position for _ in settings]
    return SamplingBatch(settings, seeds, CPU).sample(logits.clone().float(), histories)


def test_uniform_numbers_are_those_of_splitmix64() -> None:
    # First outputs of the reference implementation for seed 1234567 (Vigna, splitmix64.c).
    reference = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    numbers = uniform(np.full(3, 1234567, np.uint64), np.arange(3, dtype=np.uint64))
    assert numbers.tolist() == [(value >> 16) * 2.0**-48 for value in reference]


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -torch.inf]).repeat(20_000, 1)
    settings = [Sampling(max_tokens=1, seed=seed, temperature=0.7) for seed in range(20_000)]
    sampled = draw(logits, settings)
    frequency = torch.bincount(torch.tensor(sampled.token_ids), minlength=4) / 20_000
    want = (logits[0] / 0.7).softmax(-1)
    # Five standard deviations of a binomial proportion.
    assert ((frequency - want).abs() <= 5 * (want * (1 - want) / 20_000).sqrt()).all()
    got = torch.tensor(sampled.logprobs).exp()
    torch.testing.assert_close(got, want[torch.tensor(sampled.token_ids)])


def test_a_row_draws_the_same_whatever_else_is_in_the_batch() -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, 50)
    settings = [
        Sampling(max_tokens=1, seed=7),
        Sampling(max_tokens=1, temperature=0.0),
        Sampling(max_tokens=1, seed=9, temperature=2.0, top_k=5),
        Sampling(max_tokens=1, seed=2**64 - 1, top_p=0.5),
        Sampling(max_tokens=1, seed=3, repetition_penalty=1.5),
        Sampling(max_tokens=1, seed=4, min_p=0.2),
    ]
    together = draw(logits, settings)
    for row, setting in enumerate(settings):
        alone = draw(logits[row : row + 1], [setting])
        assert alone.token_ids == together.token_ids[row : row + 1]
        assert alone.logprobs == pytest.approx(together.logprobs[row : row + 1], abs=1e-6)


def test_the_seed_and_the_position_pick_the_number() -> None:
    logits = torch.zeros(1, 1000)
    first = draw(logits, [Sampling(max_tokens=1, seed=1)]).token_ids
    assert draw(logits, [Sampling(max_tokens=1, seed=1)]).token_ids == first
    assert draw(logits, [Sampling(max_tokens=1, seed=2)]).token_ids != first
    assert draw(logits, [Sampling(max_tokens=1, seed=1)], position=7).token_ids != first


def test_greedy_takes_the_first_of_the_likeliest_with_certainty() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0], [9.0, 0.0, 0.0]])
    greedy = Sampling(max_tokens=1, temperature=0.0, top_k=1, seed=5)
    assert draw(logits, [greedy, greedy])[:2] == ([1, 0], [0.0, 0.0])
    batch = SamplingBatch([greedy, greedy], [5, 5], CPU, [False, True])
    assert batch.sample(logits.clone(), [[0], [0]]).masks == [b"", b""]
    mixed = draw(logits, [greedy, Sampling(max_tokens=1, seed=1)])
    assert (mixed.token_ids[0], mixed.logprobs[0]) == (1, 0.0)


def kept(setting: Sampling) -> tuple[list[float], set[frozenset[int]]]:
    """Probabilities after truncation of (.2 .4 .1 .3), by drawing often, and the ids of masks."""
    logits = torch.tensor([0.2, 0.4, 0.1, 0.3]).log()
    found = [0.0] * 4
    masks = set()
    for seed in range(400):
        one = Sampling(
            max_tokens=1, seed=seed, top_k=setting.top_k, top_p=setting.top_p, min_p=setting.min_p
        )
        batch = SamplingBatch([one], [seed], CPU, [True])
        (token_id,), (logprob,), (mask,) = batch.sample(logits.unsqueeze(0), [[0]])
        found[token_id] = math.exp(logprob)
        masks.add(frozenset(decode(mask, token_id, 4)))
    return found, masks


@pytest.mark.parametrize(
    ("setting", "probabilities"),
    [
        (Sampling(max_tokens=1, top_k=2), [0.0, 4 / 7, 0.0, 3 / 7]),
        (Sampling(max_tokens=1, top_k=99), [0.2, 0.4, 0.1, 0.3]),
        (Sampling(max_tokens=1, top_p=0.65), [0.0, 4 / 7, 0.0, 3 / 7]),
        (Sampling(max_tokens=1, top_p=1e-6), [0.0, 1.0, 0.0, 0.0]),
        (Sampling(max_tokens=1, min_p=0.45), [2 / 9, 4 / 9, 0.0, 3 / 9]),
        (Sampling(max_tokens=1, min_p=1.0), [0.0, 1.0, 0.0, 0.0]),
        # top-p sees what top-k left: .4 and .3 of .7, and the first alone passes 0.55.
        (Sampling(max_tokens=1, top_k=2, top_p=0.55), [0.0, 1.0, 0.0, 0.0]),
    ],
)
def test_truncation(setting: Sampling, probabilities: list[float]) -> None:
    found, masks = kept(setting)
    assert found == pytest.approx(probabilities, abs=1e-5)
    assert masks == {frozenset(n for n, probability in enumerate(probabilities) if probability)}


def test_repetition_penalty_follows_its_paper() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5]])
    setting = Sampling(max_tokens=1, seed=0, repetition_penalty=2.0)
    batch = SamplingBatch([setting], [0], CPU)
    sampled = batch.sample(logits.clone(), [[0, 1, 0]])
    want = torch.tensor([1.0, -2.0, 0.5]).log_softmax(-1)
    assert sampled.logprobs[0] == pytest.approx(want[sampled.token_ids[0]].item())


@pytest.mark.parametrize("penalty", [1e-45, 1e-38, 1e38])
def test_an_extreme_penalty_breaks_nothing(penalty: float) -> None:
    logits = torch.tensor([[9.0, -9.0, 4.0]])
    setting = Sampling(max_tokens=1, seed=0, repetition_penalty=penalty)
    sampled = SamplingBatch([setting], [0], CPU).sample(logits, [[0, 1]])
    assert sampled.token_ids == [2 if penalty > 1 else 0]
    assert math.isfinite(sampled.logprobs[0])


@settings(deadline=None)  # The first call is slow.
@given(st.floats(0.01, 5.0), st.integers(0, 2**64 - 1), st.integers(1, 64))
def test_what_is_drawn_is_possible(temperature: float, seed: int, vocabulary: int) -> None:
    logits = torch.linspace(-30, 30, vocabulary).unsqueeze(0)
    logits[:, ::2] = -torch.inf
    logits[:, -1] = 0.0
    sampled = draw(logits, [Sampling(max_tokens=1, seed=seed, temperature=temperature)])
    assert math.isfinite(sampled.logprobs[0])
    assert logits[0, sampled.token_ids[0]] > -torch.inf


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-6])
def test_a_temperature_near_zero_is_nearly_greedy(temperature: float) -> None:
    logits = torch.tensor([[-40.0, 7.0, 30.0, -torch.inf], [-9.0, -3.0, -5.0, -7.0]])
    setting = Sampling(max_tokens=1, seed=0, temperature=temperature)
    assert draw(logits, [setting, setting])[:2] == ([2, 1], [0.0, 0.0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_reported(temperature: float) -> None:
    logits = torch.full((1, 4), torch.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        draw(logits, [Sampling(max_tokens=1, temperature=temperature)])
