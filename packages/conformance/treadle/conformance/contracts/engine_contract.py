"""The engine contract: what every `Engine` must do, as tests to inherit.

    class TestMyEngine(EngineContract):
        @asynccontextmanager
        async def engine(self, weights=0):
            engine = MyEngine(weights_of(weights))
            yield engine
            await engine.aclose()

        def weights(self, which):
            return [NamedTensor(...), ...]

The engine needs a vocabulary of at least 32 ids and a context of at least 512 tokens, and a long
completion should take more than a few turns of the event loop. The attributes of `ContractBase`
adapt the suite to an engine. An engine that runs a real model also passes `ModelContract`.
"""

from treadle.conformance.contracts.control_contract import ControlContract
from treadle.conformance.contracts.in_process_contract import InProcessContract
from treadle.conformance.contracts.sampling_contract import SamplingContract
from treadle.conformance.contracts.update_contract import UpdateContract


# In this order: the last test of the last part may break the engine.
class EngineContract(ControlContract, UpdateContract, SamplingContract, InProcessContract):
    """The whole contract; see the module docstring."""
