"""The engine contract against a server that runs an unmodified vLLM.

With ``TREADLE_VLLM_SERVER`` it runs with the release of another environment; see docs/engines.md.
"""

from engines.remote_model_contract import WorkerContract

ENGINE = "vllm_stock"
MODELS = "tiny_models"
# Prompts of 64 ids and more are read in several steps.
ARGUMENTS = ("--model.max_num_batched_tokens", "64")


class TestStockVllmServer(WorkerContract):
    continue_recomputes = True
