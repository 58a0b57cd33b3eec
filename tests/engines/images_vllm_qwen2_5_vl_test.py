"""The image contract against a server that runs vLLM with a Qwen2.5-VL."""

from engines.remote_vision_contract import RemoteVisionContract

ENGINE = "vllm"
MODELS = "tiny_qwen2_5_vl_models"
ARGUMENTS = ("--model.enforce_eager", "true", "--engine_args", '{"block_size": 32}')


class TestVllmServer(RemoteVisionContract):
    family = "qwen2_5_vl"
