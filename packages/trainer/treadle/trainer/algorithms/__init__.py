"""Losses, advantages and updates: pure functions and the order in which they are applied."""
