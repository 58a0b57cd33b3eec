"""Agent loops: what one trajectory does, from the first prompt to its last turn.

Here live the loops that ship with the package, the conversation that a loop drives, and its
limits. Running many loops at once belongs to `runner/`, tokens to `tokens/`, tools to `tools/`.
"""
