"""Traces of a run: where its spans go, and which of its trajectories are traced.

backends.py     the table of backends, and what can be known of one before the run
run_tracing.py  the sinks of a run
"""
