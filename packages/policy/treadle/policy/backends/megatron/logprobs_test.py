from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from treadle.policy.backends import logprobs as of_logits
from treadle.policy.backends.logprobs import from_logits
from treadle.policy.backends.megatron import attention
from treadle.policy.backends.megatron.attention import (
    PackedAttention,
    ScoreRule,
    Segments,
    take_rows,
)
from treadle.policy.backends.megatron.logprobs import logprobs_and_entropy
from treadle.policy.backends.megatron.rotary import RowRotation
from treadle.policy.testing.ranks import RankTask, run_ranks

REAL = 13


def masks_of(targets_T: Tensor) -> tuple[list[bytes], Tensor]:
    """Masks of every form, and which ids each keeps, [T, REAL]."""
    forms = [
        (b"\x00", range(REAL)),
        (b"", ()),
        (b"\x01\x05\x02", (0, 5, 7)),
        (b"\x00\x03\x18", (0, 1, 11, 12)),
    ]
    kept = torch.nn.functional.one_hot(targets_T, REAL).bool()
    chosen = [forms[number % len(forms)] for number in range(len(targets_T))]
    for row, (_, ids) in zip(kept, chosen, strict=True):
        row[list(ids)] = True
    return [mask for mask, _ in chosen], kept


def truth(
    logits_TV: Tensor, targets_T: Tensor, kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Of each row by itself, over the logits that are kept."""
    if kept is None:
        kept = torch.ones(len(targets_T), REAL, dtype=torch.bool)
    logprobs, entropies = [], []
    for logits, target, ids in zip(logits_TV, targets_T, kept, strict=True):
        logp = logits[:REAL][ids].log_softmax(-1)
        logprobs.append(logp[ids[:target].sum()])
        entropies.append(-(logp.exp() * logp).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def problem(columns: int = 16, tokens: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, 8, requires_grad=True)
    head = torch.randn(columns, 8, requires_grad=True)
    return hidden, head, torch.randint(0, REAL, (tokens,))


def gradients(logp: Tensor, entropy: Tensor, hidden: Tensor, head: Tensor) -> list[Tensor]:
    upstream = torch.linspace(-1.0, 1.0, len(logp))
    return list(torch.autograd.grad((logp * upstream).sum() + 0.3 * entropy.sum(), (hidden, head)))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
def test_values_and_gradients_are_those_of_torch_without_padded_columns(
    chunk: int, masked: bool
) -> None:
    hidden, head, targets = problem()
    masks, kept = masks_of(targets)
    got = logprobs_and_entropy(
        hidden,
        head,
        targets,
        masks if masked else (),
        vocab_size=REAL,
        group=None,
        chunk=chunk,
    )
    want = truth(hidden @ head.T, targets, kept if masked else None)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, atol=5e-6, rtol=0)
    got_gradients = gradients(*got, hidden, head)
    for g, w in zip(got_gradients, gradients(*want, hidden, head), strict=True):
        torch.testing.assert_close(g, w, atol=5e-6, rtol=0)
    assert not got_gradients[1][REAL:].any()


def test_the_temperature_divides_the_logits() -> None:
    hidden, head, targets = problem()
    got = logprobs_and_entropy(
        hidden, head, targets, vocab_size=REAL, group=None, chunk=4, temperature=0.5
    )
    want = truth(2.0 * hidden @ head.T, targets)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, atol=5e-6, rtol=0)
    for g, w in zip(gradients(*got, hidden, head), gradients(*want, hidden, head), strict=True):
        torch.testing.assert_close(g, w, atol=1e-5, rtol=0)


def test_logits_are_not_written_to() -> None:
    _, _, targets = problem()
    logits = torch.randn(11, 16)
    before = logits.clone()
    from_logits(logits, targets, vocab_size=REAL, group=None)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_computed_some_at_a_time_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    targets = torch.randint(0, REAL, (11,))
    found = []
    for at_once in (1 << 20, 33):
        monkeypatch.setattr(of_logits, "NUMBERS_AT_ONCE", at_once)
        torch.manual_seed(1)
        logits = torch.randn(11, 16).to(dtype).requires_grad_()
        logp, entropy = from_logits(
            logits, targets, masks_of(targets)[0], vocab_size=REAL, group=None, temperature=0.5
        )
        (grad,) = torch.autograd.grad((logp - 0.1 * entropy).sum(), logits)
        found.append((logp, entropy, grad))
    assert all(torch.equal(*each) for each in zip(*found, strict=True))


def over_ranks(task: RankTask) -> list[Any]:
    """Each rank holds `argument` columns of the vocabulary."""
    from treadle.policy.backend import Rendezvous
    from treadle.policy.backends.megatron import parallel
    from treadle.policy.config.policy import ParallelConfig

    world = parallel.start(
        ParallelConfig(tensor=task.num_ranks),
        Rendezvous(
            rank=task.rank,
            world_size=task.num_ranks,
            shared_file=task.folder / "meet",
        ),
    )
    hidden, head, targets = problem(columns=task.argument * task.num_ranks)
    mine = head[task.rank * task.argument : (task.rank + 1) * task.argument]
    logp, entropy = logprobs_and_entropy(
        hidden,
        mine,
        targets,
        masks_of(targets)[0],
        vocab_size=REAL,
        group=world.tensor_group,
        chunk=5,
    )
    hidden_grad, head_grad = gradients(logp, entropy, hidden, head)
    world.close()
    values = (logp, entropy, hidden_grad, head_grad)
    return [value.detach().numpy() for value in values]


def test_vocabulary_parallel_values_and_gradients() -> None:
    columns = 14  # the second rank has padding only
    hidden, head, targets = problem(columns=2 * columns)
    want = truth(hidden @ head.T, targets, masks_of(targets)[1])
    hidden_grad, head_grad = gradients(*want, hidden, head)
    ranks = run_ranks(f"{__name__}:over_ranks", 2, columns)
    for logp, entropy, of_hidden, _ in ranks:
        for got, exact in [(logp, want[0]), (entropy, want[1]), (of_hidden, hidden_grad)]:
            np.testing.assert_allclose(got, exact.detach().numpy(), atol=2e-6)
    np.testing.assert_allclose(sum(r[3] for r in ranks), head_grad.numpy(), atol=2e-6)


def packed_attention(scores: ScoreRule) -> PackedAttention:
    core = PackedAttention.__new__(PackedAttention)
    torch.nn.Module.__init__(core)
    core._scores = scores
    return core


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=8),
    st.integers(0, 3),
    st.sampled_from([None, 1, 4, 9]),
    st.sampled_from([None, 0.7]),
)
def test_packed_attention_is_attention_of_each_segment_alone(
    lengths: list[int], padding: int, window: int | None, softcap: float | None
) -> None:
    lengths = sorted(lengths)
    rows = sum(lengths) + padding
    torch.manual_seed(rows)
    query = torch.randn(rows, 1, 4, 4, requires_grad=True)
    key, value = (torch.randn(rows, 1, 2, 4, requires_grad=True) for _ in range(2))
    segments = Segments.of_lengths(lengths, torch.device("cpu"))
    nowhere = torch.zeros(rows, 2)
    segments.rotations = (RowRotation.of_angles(nowhere, torch.float32, interleaved=False),)
    core = packed_attention(ScoreRule(scale=0.5, window=window, softcap=softcap))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_BLOCK", 5)
        got = core(query, key, value, None, packed_seq_params=segments)

    parts, start = [], 0
    for length in lengths:
        q, k, v = (x[start : start + length, 0].transpose(0, 1) for x in (query, key, value))
        k, v = (x.repeat_interleave(2, 0) for x in (k, v))
        seen = torch.ones(length, length).tril()
        seen = seen if window is None else seen.triu(1 - window)
        products = q @ k.transpose(1, 2) * 0.5
        products = products if softcap is None else softcap * (products / softcap).tanh()
        weights = (products + seen.log()).softmax(-1)
        parts.append((weights @ v).transpose(0, 1).reshape(length, 1, 16))
        start += length
    want = torch.cat([*parts, torch.zeros(padding, 1, 16)])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    upstream = torch.randn_like(want)
    for g, w in zip(
        torch.autograd.grad(got, (query, key, value), upstream),
        torch.autograd.grad(want, (query, key, value), upstream),
        strict=True,
    ):
        torch.testing.assert_close(g, w, atol=1e-5, rtol=0)


def test_taking_rows_has_the_gradient_of_indexing() -> None:
    x = torch.randn(6, 3, requires_grad=True)
    index = torch.tensor([4, 0, 5])
    upstream = torch.randn(3, 3)
    (got,) = torch.autograd.grad(take_rows(x, index), x, upstream)
    (want,) = torch.autograd.grad(x[index], x, upstream)
    assert torch.equal(got, want)
