"""SmolLM2-135M-Instruct behind a server that runs SGLang."""

from engines.smollm2_contract import SmolContract

ENGINE = "sglang"
MODELS = "smollm2_models"
ARGUMENTS = ()


class TestSmolOnSglang(SmolContract):
    continue_recomputes = True
