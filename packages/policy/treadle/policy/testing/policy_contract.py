"""The policy contract: what every `PolicyBackend` must do, as tests to inherit.

    class TestMyPolicy(PolicyContract):
        backend = "mine"  # as `registry` finds it

What a backend cannot do by its `Capabilities` is left out, and must be refused by name. The
attributes of `ContractBase` and `LayoutContract` adapt the suite: the model types that are compared
with transformers, the layouts that are compared with one process.
"""

from treadle.policy.testing.critic_contract import CriticContract
from treadle.policy.testing.layout_contract import LayoutContract
from treadle.policy.testing.lora_contract import LoraContract
from treadle.policy.testing.model_contract import ModelContract
from treadle.policy.testing.offload_contract import OffloadContract
from treadle.policy.testing.state_contract import StateContract
from treadle.policy.testing.step_contract import StepContract


class PolicyContract(
    ModelContract,
    StepContract,
    StateContract,
    LoraContract,
    CriticContract,
    OffloadContract,
    LayoutContract,
):
    """The whole contract; see the module docstring."""
