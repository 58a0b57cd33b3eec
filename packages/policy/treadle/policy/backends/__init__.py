"""The backends of a policy, a folder each; `treadle.policy.backend` is what they implement."""
