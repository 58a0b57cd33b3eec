"""The runner: many tasks with bounded concurrency, one trajectory per task.

This folder holds the runner, its failure policies, its watchdog and the seeds. What a single
trajectory does belongs in `loops/`.
"""
