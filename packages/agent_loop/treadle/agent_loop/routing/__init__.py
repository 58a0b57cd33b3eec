"""Routing: the policies that decide which replica serves which session.

Pure functions and tables, without clock, socket or task. The client in `rpc/` and the routing
service in `rpc/router/` use them; nothing here may import `rpc/`.
"""
