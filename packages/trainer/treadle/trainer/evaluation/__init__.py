"""Evaluation alone: a model, a run or a server -> scores, a table and a file of results.

It samples as the validation of a run does: the same loops, tools, rewards, settings and seeds. No
policy is started and no weight is sent. The process needs neither torch nor Megatron; transformers,
which reads the tokenizer, loads torch where it is installed.
"""
