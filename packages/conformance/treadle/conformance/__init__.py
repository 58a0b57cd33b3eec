"""The conformance kit: does a rollout server, in whatever language, speak the contract?

Here live the command (`python -m treadle.conformance --address HOST:PORT`), its checks and its
report. `contracts/` holds the suites that an engine must pass, `client/` the client that drives
a server. A server of ours is never imported by `checks/`, only asked.
"""
