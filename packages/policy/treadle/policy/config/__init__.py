"""The settings of the policy: its own, those of its algorithm, and of weight sync."""
