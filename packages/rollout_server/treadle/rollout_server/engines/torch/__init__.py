"""The embedded engine, chosen as ``torch``: a Hugging Face model in the server's process.

`engine.py` is what the server sees; `compute_thread.py` is where it runs; `core.py` steps
the batch that `scheduler.py` composes, over `kv_rows.py`, `prefix.py`, `attention.py`,
`model.py` and `sampling.py`; `images.py` reads the images of prompts and `vision.py` places them.
"""

from treadle.rollout_server.engines.torch.engine import TorchEngine, create
from treadle.rollout_server.engines.torch.model import ModelSource

__all__ = ["ModelSource", "TorchEngine", "create"]
