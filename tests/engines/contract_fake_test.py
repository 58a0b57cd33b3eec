"""The engine contract against a server that runs the fake engine."""

from treadle.conformance.contracts.engine_contract import EngineContract
from treadle.conformance.contracts.remote_contract import RemoteContract

ENGINE = "fake"
MODELS = "tiny_models"
ARGUMENTS = ("--fake.decode_s_per_token", "0.001")


class TestFakeServer(RemoteContract, EngineContract):
    places = 8
