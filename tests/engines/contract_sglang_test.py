"""The engine contract against a server that runs SGLang."""

from engines.remote_model_contract import WorkerContract

ENGINE = "sglang"
MODELS = "tiny_models"
ARGUMENTS = ()


class TestSglangServer(WorkerContract):
    continue_recomputes = True
