"""The engine contract against a server that runs the torch engine."""

from engines.remote_model_contract import RemoteModelContract

ENGINE = "torch"
MODELS = "tiny_models"
ARGUMENTS = ()


class TestTorchServer(RemoteModelContract):
    pass
