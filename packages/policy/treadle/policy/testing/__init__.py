"""The policy contract (`policy_contract`), and what tests of a policy need beside it."""
