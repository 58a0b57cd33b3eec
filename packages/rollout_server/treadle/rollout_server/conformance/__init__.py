"""The conformance kit: whether a server, in whatever language, speaks the rollout contract."""
