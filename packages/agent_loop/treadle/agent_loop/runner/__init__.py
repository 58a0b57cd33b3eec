"""The runner: many tasks with bounded concurrency, one trajectory per task.

Here live the runner, its failure policy, its watchdog and the seeds. What a single trajectory
does belongs to `loops/`.
"""
