"""The math expression demo: expressions with an operator of their own, computed call by call."""
