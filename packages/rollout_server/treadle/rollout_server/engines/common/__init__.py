"""Code that several engines share: sampling, start-up, collective groups, staged weights.

Only engines import from here. Code for a single engine belongs in the folder of that engine.
"""
