"""Schedules: in which order rollout, update, weight sync and the rest take place."""
