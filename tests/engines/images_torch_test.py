"""The image contract against a server that runs the torch engine with a Qwen2.5-VL."""

from engines.remote_vision_contract import RemoteVisionContract

ENGINE = "torch"
MODELS = "tiny_qwen2_5_vl_models"
ARGUMENTS = ()


class TestTorchServer(RemoteVisionContract):
    family = "qwen2_5_vl"
