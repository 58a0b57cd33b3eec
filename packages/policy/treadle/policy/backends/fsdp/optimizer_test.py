"""Optimizers besides AdamW: steps of their libraries, whatever the number of ranks."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.policy.backend import CheckpointError, Rendezvous
from treadle.policy.backends import registry
from treadle.policy.backends.fsdp.description import FsdpDescription
from treadle.policy.backends.fsdp.optimizer import orthogonal
from treadle.policy.config.policy import OptimizerConfig, ParallelConfig, PolicyConfig
from treadle.policy.testing.model_contract import wanted
from treadle.policy.testing.ranks import RankTask, run_ranks
from treadle.policy.testing.state_contract import LOSS, go_on
from treadle.policy.testing.tiny import sequences, write_model

NAMES = ("muon", *(("adamw8bit",) if find_spec("bitsandbytes") else ()))
LR = 1e-2
HIDDEN = 256
"""As many as share a scale, so that 8 bits are at work."""


@contextmanager
def open_policy(
    name: str, folder: Path, place: Rendezvous | None = None, **settings: Any
) -> Iterator[Any]:
    """Gives a policy, and closes it."""
    optimizer = OptimizerConfig.model_validate({"name": name, "lr": LR, "eps": 1e-3})
    config = PolicyConfig(backend="fsdp", optimizer=optimizer, micro_batch_tokens=100, **settings)
    policy = registry.build(
        config, folder, place or Rendezvous(), keep_reference=False, reference_path=None
    )
    try:
        yield policy
    finally:
        policy.close()


def gradients(model: Any) -> Mapping[str, torch.Tensor]:
    """Returns the clipped gradient of the loss of a batch, from transformers."""
    batch = sequences()
    total = sum(s.num_loss_tokens for s in batch)
    for s in batch:
        logp, mask = wanted(model, s)
        assert isinstance(s.advantages, float)
        (-((logp - logp.detach()).exp() * s.advantages * mask).sum() / total).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return {name: p.grad for name, p in model.named_parameters()}


def is_matrix(name: str) -> bool:
    return ".layers." in name and "norm" not in name and "bias" not in name


def test_a_step_of_muon_is_that_of_torch(tmp_path: Path) -> None:
    """Two steps, with momentum; Muon computes in bfloat16, which rounds."""
    model: Any = write_model(tmp_path, num_hidden_layers=2)
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if is_matrix(name)]
    others = [p for name, p in named.items() if not is_matrix(name)]
    muon = torch.optim.Muon(
        matrices, lr=LR, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    decayed, plain = ([p for p in others if (p.dim() > 1) is part] for part in (True, False))
    adam = torch.optim.AdamW(decayed, lr=LR, weight_decay=0.01, eps=1e-3)
    adam.add_param_group({"params": plain, "weight_decay": 0.0})
    with open_policy("muon", tmp_path) as policy:
        for step in range(2):
            model.zero_grad()
            gradients(model)
            policy.train_step(sequences(), LOSS)
            before = copy.deepcopy(named)
            muon.step()
            adam.step()
            for item in policy.export_weights():
                moved = named[item.name] - before[item.name]
                apart = (item.tensor - named[item.name]).norm() / moved.norm()
                assert apart < (1e-2, 0.1)[step], item.name


def test_each_expert_has_a_step_of_its_own(tmp_path: Path) -> None:
    several = torch.randn(3, 8, 12, generator=torch.Generator().manual_seed(0))
    moves = orthogonal(several)
    for matrix, move in zip(several, moves, strict=True):
        assert torch.equal(orthogonal(matrix), move)
        # Singular values are between about 0.5 and 1.5, scaled by 0.2 sqrt(12).
        sizes = torch.linalg.svdvals(move) / (0.2 * 12**0.5)
        assert sizes.min() > 0.3 and sizes.max() < 1.7
        assert (move * matrix).sum() < 0
    write_model(tmp_path, "qwen3_moe", num_hidden_layers=1)
    with open_policy("muon", tmp_path) as policy:
        kept = policy._optimizer._state
        assert any("experts" in name for name in kept if "momentum" in kept[name])
        assert not policy.train_step(sequences(), LOSS).skipped


@pytest.mark.skipif("adamw8bit" not in NAMES, reason="bitsandbytes is not installed")
def test_a_first_step_of_8_bits_is_that_of_float32(tmp_path: Path) -> None:
    """The moments are rounded after it, to a quarter of their memory."""
    model: Any = write_model(tmp_path, num_hidden_layers=2, hidden_size=HIDDEN)
    named = dict(model.named_parameters())
    for name, gradient in gradients(model).items():
        decay = 0.01 if gradient.dim() > 1 else 0.0
        with torch.no_grad():
            named[name].mul_(1 - LR * decay).sub_(LR * gradient / (gradient.abs() + 1e-3))
    with open_policy("adamw8bit", tmp_path) as policy:
        policy.train_step(sequences(), LOSS)
        for item in policy.export_weights():
            assert (item.tensor - named[item.name]).abs().max() < 1e-5, item.name
        kept = sum(tensor.nbytes for tensor in policy._optimizer.tensors())
        described = FsdpDescription()
        estimate = described.memory(described.read_model(tmp_path), policy._config, rows=1)
    # Of the 176 columns of a down projection no whole number of blocks is made.
    assert estimate.optimizer <= kept < 0.7 * 2 * sum(p.nbytes for p in model.parameters())


def on_two_ranks(task: RankTask) -> dict[str, Any]:
    folder, names = task.argument
    found = {}
    for name in names:
        place = Rendezvous(rank=task.rank, world_size=2, shared_file=task.folder / name)
        parallel = ParallelConfig(data=2)
        with open_policy(name, folder / "model", place, parallel=parallel) as policy:
            go_on(policy, 2)
            policy.save(folder / f"{name}-two")
            first = go_on(policy, 2)
            policy.load(folder / f"{name}-two")
            assert go_on(policy, 2) == first
            policy.load(folder / f"{name}-one")
            found[name] = first, go_on(policy, 2)
    return found


def test_ranks_and_resumed_runs_compute_what_one_process_does(tmp_path: Path) -> None:
    write_model(tmp_path / "model", num_hidden_layers=2, hidden_size=HIDDEN)
    want = {}
    for name in NAMES:
        with open_policy(name, tmp_path / "model") as policy:
            go_on(policy, 2)
            policy.save(tmp_path / f"{name}-one")
            want[name] = go_on(policy, 2)
            policy.load(tmp_path / f"{name}-one")
            assert go_on(policy, 2) == want[name]
    ranks = run_ranks(f"{__name__}:on_two_ranks", 2, (tmp_path, NAMES))
    for name in NAMES:
        with open_policy(name, tmp_path / "model") as policy:
            policy.load(tmp_path / f"{name}-two")
            runs = [go_on(policy, 2), *(run for rank in ranks for run in rank[name])]
        for run in runs:
            for got, wanted_step in zip(run, want[name], strict=True):
                assert got == pytest.approx(wanted_step, rel=1e-2, abs=1e-4), name
    with (
        open_policy("adamw", tmp_path / "model") as policy,
        pytest.raises(CheckpointError, match=r"policy\.optimizer\.name is muon, not None"),
    ):
        policy.load(tmp_path / "muon-one")


def test_8_bits_without_their_library_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, num_hidden_layers=1)
    monkeypatch.setattr(f"{FsdpDescription.__module__}.find_spec", lambda name: None)
    with (
        pytest.raises(ValueError, match=r"adamw8bit needs bitsandbytes: pip install"),
        open_policy("adamw8bit", tmp_path),
    ):
        pass
