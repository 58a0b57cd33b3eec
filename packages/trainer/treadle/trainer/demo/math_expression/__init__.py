"""The math expression demo: its tool, model and rows. Expressions are computed call by call."""
