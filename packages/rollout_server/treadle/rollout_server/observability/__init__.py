"""What an operator sees: logs, counters and metrics.

Here live the log format, the counters of one server and their Prometheus endpoint. Nothing here
decides anything about a request.
"""
