"""A client of the contract for tests: stubs, messages, refusals, and an engine at an address.

Here lives what checks and contracts speak to a server with. The trainer's and the agent loop's
own clients are in their packages.
"""
