"""Common beginnings of a micro-batch's sequences, computed once.

`tree.py` lays the sequences out, `plan.py` cuts a batch into micro-batches, `attention.py` attends.
"""
