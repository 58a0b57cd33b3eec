"""The embedded engine, selected as ``torch``: a Hugging Face model in the server's process.

`engine.py` implements `Engine`; `compute_thread.py` is the thread on which it computes;
`core.py` steps the batch that `scheduler.py` composes, with `model.py`, `attention.py`,
`kv_cache.py` and `prefix_cache.py`; `images.py` decodes the images of prompts and `vision.py`
encodes them.
"""

from treadle.rollout_server.engines.torch.engine import TorchEngine, create
from treadle.rollout_server.engines.torch.model import ModelSource

__all__ = ["ModelSource", "TorchEngine", "create"]
