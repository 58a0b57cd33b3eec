"""The time shares of a step: what the time of every server and every policy rank went to.

Invariant: the shares of the servers add up to 1, and so do those of the ranks. A share is the mean
over the processes; `busy.py` has the extremes. `servers.py` and `ranks.py` measure, docs/metrics.md
has the names.
"""
