"""A client of the contract for checks and tests: stubs, messages, refusals and a remote engine.

The trainer and the agent loop have their own clients.
"""
