"""Images: the vision tower on the first pipeline stage.

The tower is the module of transformers; the language model is Megatron's. `backends/vision` says
which rows of a micro-batch are images, and `tower.py` fills them.
"""
