"""Images of prompts, the same for every engine that takes them.

`reader.py` decodes and checks them, `patches.py` makes the input of a vision tower, and
`positions.py` computes rotary positions. `inputs.py` brings these together for engines that run in
other processes, and `model_types.py` says for which models. Image processors of the Qwen2-VL family
are supported (Qwen2-VL, Qwen2.5-VL, Qwen3-VL).
"""
