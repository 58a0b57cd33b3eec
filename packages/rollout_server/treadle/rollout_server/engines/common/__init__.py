"""What several engines share: sampling, start-up, collective groups, staged weights.

Here lives code for the processes of an engine. An engine's own rules belong to its folder, and
nothing outside `engines/` imports from here.
"""
