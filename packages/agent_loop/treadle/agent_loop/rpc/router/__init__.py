"""The routing service: one view of the replicas, shared by agent loops in several processes.

Here live the service (`python -m treadle.agent_loop.rpc.router`) and its client. The placement
rules are in `treadle.agent_loop.routing.placement`, without gRPC.
"""
