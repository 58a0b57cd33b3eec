"""The SGLang engine, chosen as ``sglang``: its scheduler in processes of its own.

`launch.py` makes `engine.py`, which is what the server sees; `process.py` starts SGLang and
hears of its end; `worker.py` is what we add to its scheduler, which draws with `sampling.py`
and takes weights as `weights.py` says; `arguments.py` and `sequence.py` translate;
`startup.py` prepares the processes, and `shims.py` lets them do without what has no CPU build.

Only `process.py` and `worker.py` import sglang, when an engine is made.
"""

from treadle.rollout_server.engines.sglang.engine import SglangEngine
from treadle.rollout_server.engines.sglang.launch import create

__all__ = ["SglangEngine", "create"]
