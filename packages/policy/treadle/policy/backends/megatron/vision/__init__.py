"""Images: the vision tower on the first pipeline stage.

The tower is the module of transformers; the language model is Megatron's. `backends/vision` finds
the rows of a micro-batch that are images, and `tower.py` fills them.
"""
