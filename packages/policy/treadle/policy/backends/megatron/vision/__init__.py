"""Images: the vision tower on the first pipeline stage, and the positions of what it computes.

The tower is the module of transformers; the language model is Megatron's. `shape.py` says what a
model's tower is, `reader.py` makes pixels of the files' bytes, `positions.py` numbers rows in three
axes, `rows.py` says which rows of a micro-batch are images, and `tower.py` fills them.
"""
