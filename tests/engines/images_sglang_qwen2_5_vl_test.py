"""The image contract against a server that runs SGLang with a Qwen2.5-VL."""

from engines.remote_vision_contract import RemoteVisionContract

ENGINE = "sglang"
MODELS = "tiny_qwen2_5_vl_models"
ARGUMENTS = ()


class TestSglangServer(RemoteVisionContract):
    family = "qwen2_5_vl"
