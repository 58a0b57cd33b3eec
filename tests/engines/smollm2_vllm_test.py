"""SmolLM2-135M-Instruct behind a server that runs vLLM."""

from engines.smollm2_contract import SmolContract

ENGINE = "vllm"
MODELS = "smollm2_models"
ARGUMENTS = ("--model.enforce_eager", "true")


class TestSmolOnVllm(SmolContract):
    pass
