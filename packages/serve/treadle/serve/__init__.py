"""`treadle serve`: a policy and its rollout servers behind the HTTP API of Tinker's SDK.

The service is a client: of the policy's contract (`treadle.policy.client`) and of rollout servers
(`treadle.agent_loop.rpc`), which the trainer's launch code starts. `docs/serve.md` has the table of
what is answered and what is refused.
"""
