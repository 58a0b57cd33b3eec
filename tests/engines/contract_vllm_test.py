"""The engine contract against a server that runs vLLM."""

from engines.remote_model_contract import WorkerContract

ENGINE = "vllm"
MODELS = "tiny_models"
ARGUMENTS = ("--model.enforce_eager", "true")


class TestVllmServer(WorkerContract):
    pass
