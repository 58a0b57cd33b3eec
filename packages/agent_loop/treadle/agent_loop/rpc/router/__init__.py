"""The routing service: one view of the replicas, shared by agent loops in several processes.

This folder holds the service (`python -m treadle.agent_loop.rpc.router`), its client and the
session queue. The placement policies are in `routing/`, without gRPC.
"""
