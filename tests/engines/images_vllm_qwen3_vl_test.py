"""The image contract against a server that runs vLLM with a Qwen3-VL."""

from engines.remote_vision_contract import RemoteVisionContract

ENGINE = "vllm"
MODELS = "tiny_qwen3_vl_models"
ARGUMENTS = ("--model.enforce_eager", "true", "--engine_args", '{"block_size": 32}')


class TestVllmServer(RemoteVisionContract):
    family = "qwen3_vl"
