import importlib.metadata
import pickle
import subprocess
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch

from treadle.policy.backends.megatron import device
from treadle.policy.testing.tiny import sequences, write_model

# Where a training step and a checkpoint reach the facade. If one is gone, Megatron has moved: read
# its new source, and adapt the facade or this list.
SITES = {
    ("type_", "optimizer/optimizer.py:__init__"),
    ("set_state", "tensor_parallel/random.py:add"),
    ("torch.cuda", "tensor_parallel/layers.py:__init__"),
    ("torch.cuda", "distributed/param_and_grad_buffer.py:__init__"),
    ("torch.cuda", "tensor_parallel/random.py:add"),
    ("tensor", "optimizer/optimizer.py:__init__"),
    ("zeros", "pipeline_parallel/schedules.py:forward_backward_no_pipelining"),
}


def trace(folder: Path) -> set[tuple[str, str]]:
    """Every site that a bfloat16 step, a float32 step and a checkpoint reach."""
    assert device.install()
    seen: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code, caller = frame.f_code, frame.f_back
        if event != "call" or code.co_filename != device.__file__:
            return
        while caller is not None and "megatron/core/" not in caller.f_code.co_filename:
            caller = caller.f_back
        if caller is None:
            return
        given = frame.f_locals
        if code.co_name == "call" and not str(given["kwargs"].get("device")).startswith("cuda"):
            return  # of a factory that is not asked for a tensor of CUDA
        name = given["factory"].__name__ if code.co_name == "call" else code.co_name
        if code.co_qualname.startswith("_cuda_namespace."):
            name = "torch.cuda"
        file = caller.f_code.co_filename.rpartition("megatron/core/")[2]
        seen.add((name, f"{file}:{caller.f_code.co_name}"))

    from treadle.policy.algorithms.losses import NegativeLogLikelihood
    from treadle.policy.backends.megatron.backend import MegatronPolicy
    from treadle.policy.config.policy import PolicyConfig

    write_model(folder / "model")
    sys.setprofile(note)
    for dtype in ("bfloat16", "float32"):
        policy = MegatronPolicy(PolicyConfig(dtype=dtype), folder / "model")
        policy.train_step(sequences(), NegativeLogLikelihood())
        policy.save(folder / dtype)
        policy.load(folder / dtype)
        policy.close()
    sys.setprofile(None)
    return seen


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
    assert SITES - seen == set()


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
