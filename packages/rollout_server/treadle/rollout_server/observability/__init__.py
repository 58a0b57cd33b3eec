"""Logs, statistics and metrics for operators: the log format and a Prometheus endpoint.

Nothing here influences a request.
"""
