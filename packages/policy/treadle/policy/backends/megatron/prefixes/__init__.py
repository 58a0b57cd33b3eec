"""Common beginnings of a micro-batch's sequences, computed once.

`client/prefixes.py` cuts a batch into micro-batches, `tree.py` lays one out, `attention.py`
attends.
"""
