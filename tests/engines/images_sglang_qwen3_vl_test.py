"""The image contract against a server that runs SGLang with a Qwen3-VL."""

from engines.remote_vision_contract import RemoteVisionContract

ENGINE = "sglang"
MODELS = "tiny_qwen3_vl_models"
ARGUMENTS = ()


class TestSglangServer(RemoteVisionContract):
    family = "qwen3_vl"
