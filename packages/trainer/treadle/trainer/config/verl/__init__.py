"""Verl's keys with their defaults, and why Treadle has nothing like some of them.

`defaults.json` is recorded from verl's package; `reasons.py` has the reasons given in refusals. The
supported keys are in `config/verl_table.py` and `config/verl_keys.py`.
"""
