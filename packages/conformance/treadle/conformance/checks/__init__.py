"""The checks of the kit: each asks a running server, message by message, over gRPC.

One file per part of the contract. A check knows the server by its address only, so that it holds
for servers in any language.
"""
