"""Supervised fine-tuning: trains on conversations with the policy's train step.

    demonstration.py   a conversation to imitate
    conversations.py   rows of files -> demonstrations
    transcribe.py      a demonstration -> the token ledgers of rollouts with the same messages
    examples.py        demonstrations -> sequences to train on, within the length limit
    fine_tune.py       optimizer steps of a policy in this process
    check.py           what is checked before a run, and the plan
    run.py             from a checked configuration to a finished run directory (`treadle sft`)

Importing this package loads no torch: the driver uses it.
"""

from treadle.trainer.sft.demonstration import Demonstration
from treadle.trainer.sft.fine_tune import fine_tune
from treadle.trainer.sft.transcribe import train_sequences, transcribe

__all__ = ["Demonstration", "fine_tune", "train_sequences", "transcribe"]
