"""The engine contract against a server that runs vLLM."""

from engines.remote_model_contract import WorkerContract

ENGINE = "vllm"
MODELS = "tiny_models"
# Prompts of 64 ids and more are read in several steps.
ARGUMENTS = ("--model.enforce_eager", "true", "--model.max_num_batched_tokens", "64")


class TestVllmServer(WorkerContract):
    pass
