"""Tools and simulated users, as an agent loop calls them.

This folder holds the protocols, the toolbox of one trajectory, and tools made from functions.
Concrete tools belong in the package `treadle.tools`.
"""
