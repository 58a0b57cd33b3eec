"""The engine contract against a server that runs SGLang."""

from engines.remote_model_contract import WorkerContract

ENGINE = "sglang"
MODELS = "tiny_models"
# Prompts of 64 ids and more are read in several steps.
ARGUMENTS = ("--model.max_num_batched_tokens", "64")


class TestSglangServer(WorkerContract):
    continue_recomputes = True
