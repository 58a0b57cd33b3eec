"""The doctor of a whole system: what can be wrong with an environment, a machine or a run.

`environment.py` checks the interpreter and its packages, `machine.py` the machine, `gpus.py` the
GPUs and the settings of NCCL, and `run.py` one run: it makes the checks of `preflight`, runs the
server's own doctor in the engine's environment, and inspects the nodes of a Ray cluster.

Invariant: a check changes nothing and cannot crash the doctor, and each warning or failure names a
remedy. A run's checks are listed in `preflight` only.
"""

from treadle.trainer.doctor.environment import check_environment
from treadle.trainer.doctor.gpus import check_gpus
from treadle.trainer.doctor.machine import check_machine
from treadle.trainer.doctor.run import check_settings

__all__ = [
    "check_environment",
    "check_gpus",
    "check_machine",
    "check_settings",
]
