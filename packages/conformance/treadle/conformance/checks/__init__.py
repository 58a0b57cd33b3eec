"""The checks of the kit: each talks to a running server over gRPC, message by message.

There is one file per part of the contract. A check needs only the address of the server, so it
works for servers in any language.
"""
