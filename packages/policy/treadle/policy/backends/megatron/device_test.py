import importlib.metadata
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from treadle.policy.backends.megatron import device
from treadle.policy.testing.tiny import sequences, write_model

# Where a training step and a checkpoint reach the facade. If one is gone, Megatron has moved: read
# its new source, and adapt the facade or this list.
SITES = {
    ("Tensor.type()", "optimizer/optimizer.py:__init__"),
    ("tensor_parallel.random._set_cuda_rng_state", "tensor_parallel/random.py:add"),
    ("torch.cuda.current_device", "tensor_parallel/layers.py:__init__"),
    ("torch.cuda.current_device", "distributed/param_and_grad_buffer.py:__init__"),
    ("torch.cuda.manual_seed", "tensor_parallel/random.py:add"),
    ("torch.tensor(device='cuda')", "optimizer/optimizer.py:__init__"),
    ("torch.zeros(device='cuda')", "pipeline_parallel/schedules.py:forward_backward_no_pipelining"),
}


def trace(folder: Path) -> Counter[tuple[str, str]]:
    """Every site that a bfloat16 step, a float32 step and a checkpoint reach."""
    assert device.install(trace=True)
    from treadle.policy.algorithms.losses import NegativeLogLikelihood
    from treadle.policy.backends.megatron.backend import MegatronPolicy
    from treadle.policy.config.policy import PolicyConfig

    write_model(folder / "model")
    for dtype in ("bfloat16", "float32"):
        policy = MegatronPolicy(PolicyConfig(dtype=dtype), folder / "model")
        policy.train_step(sequences(), NegativeLogLikelihood())
        policy.save(folder / dtype)
        policy.load(folder / dtype)
        policy.close()
    return device.patched_sites()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the facade stands aside for CUDA")
def test_megatron_still_reaches_the_facade_where_it_was_written_for(tmp_path: Path) -> None:
    # In an interpreter that has not imported Megatron: the facade is installed before it.
    code = (
        f"import importlib, pathlib, pickle, sys; sys.path[:] = {sys.path!r}\n"
        f"seen = importlib.import_module({__name__!r}).trace(pathlib.Path({str(tmp_path)!r}))\n"
        f"pathlib.Path({str(tmp_path / 'seen')!r}).write_bytes(pickle.dumps(seen))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    seen = pickle.loads((tmp_path / "seen").read_bytes())
    assert SITES - seen.keys() == set()


def test_another_version_of_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.17.0")
    wanted = "0.16.1" if sys.version_info < (3, 12) else "0.19.2"
    with pytest.raises(ImportError, match=rf"0\.17\.0 is installed.*megatron-core=={wanted}$"):
        device.install()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the facade stands aside for CUDA")
def test_installing_after_megatron_is_refused() -> None:
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "import megatron.core\n"
        "from treadle.policy.backends.megatron import device\n"
        "device.install()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "megatron.core was imported before" in done.stderr


def test_torch_itself_is_unchanged_but_for_two_methods() -> None:
    device.install()
    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert torch.zeros(1).type(torch.float64).dtype is torch.float64
    if not torch.cuda.is_available():
        assert torch.zeros(1).cuda().device == torch.device("cpu")
        with pytest.raises((AssertionError, RuntimeError)):
            torch.zeros(1, device="cuda")
