"""Routing: which replica serves which session.

Pure functions and tables: no clock, no socket, no task. The client in `rpc/` and the routing
service in `rpc/router/` both use them.
"""
