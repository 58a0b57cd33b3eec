"""Scheduling: which completion runs, which waits, and what state the server is in.

Here live the request queue, admission, the lifecycle and the controller of the engine. Nothing
here depends on gRPC; `services/` translates.
"""
