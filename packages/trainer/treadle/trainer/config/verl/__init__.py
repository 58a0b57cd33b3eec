"""Verl's keys with their defaults, and why Treadle has nothing like some of them.

`defaults.json` is recorded from verl's package, `reasons.py` is what a refusal says. The keys that
mean something here are in `config/verl_table.py` and `config/verl_keys.py`.
"""
