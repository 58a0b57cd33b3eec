"""Agent loops: what one trajectory does, from its prompt to its last turn.

This folder holds the built-in loops, the conversation that a loop drives, and its limits. Running
many loops at once belongs in `runner/`, token ids in `tokens/`, tools in `tools/`.
"""
