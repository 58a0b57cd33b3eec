"""What a run shows on the console: progress, the line of each step, the summary at its end."""
