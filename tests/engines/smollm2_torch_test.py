"""SmolLM2-135M-Instruct behind a server that runs the torch engine."""

from engines.smollm2_contract import SmolContract

ENGINE = "torch"
MODELS = "smollm2_models"
ARGUMENTS = ()


class TestSmolOnTorch(SmolContract):
    pass
