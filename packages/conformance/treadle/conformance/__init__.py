"""The conformance kit: checks whether a rollout server, in any language, speaks the contract.

`main.py` is the command (`python -m treadle.conformance --address HOST:PORT`), `checks/` holds what
it checks, `server_harness.py` how a check talks to a server, `contracts/` the suites that an engine
must pass, `client/` the client of a server.

From `treadle.rollout_server` the kit imports four modules: `engine` (the protocol and its
types), `errors`, `address` and `safetensors_file`. It imports none of our server's implementation
and reaches it only over gRPC; import-linter enforces this. `checks/` imports only `engine`'s types.
"""
