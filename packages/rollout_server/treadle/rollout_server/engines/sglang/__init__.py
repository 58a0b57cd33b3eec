"""The SGLang engine, selected as ``sglang``: SGLang's schedulers in separate processes.

`launch.py` builds `engine.py`, which implements `Engine`; `process.py` starts SGLang and watches
it; `worker.py` extends its scheduler, which samples with `sampling.py` and loads weights with
`weights.py`; `arguments.py` and `sequence.py` translate between our types and SGLang's;
`startup.py` prepares the processes and installs stubs for kernels without a CPU build.

Only `process.py` and `worker.py` import sglang, when an engine is created.
"""

from treadle.rollout_server.engines.sglang.engine import SglangEngine
from treadle.rollout_server.engines.sglang.launch import create

__all__ = ["SglangEngine", "create"]
