"""Tools and simulated users, as an agent loop calls them.

Here live the protocols, the toolbox of one trajectory, and tools made from Python functions.
Concrete tools belong to the package `treadle.tools`.
"""
