"""The console of a run: progress, the line of each step, the summary at its end."""
