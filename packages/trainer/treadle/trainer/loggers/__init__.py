"""Loggers: they record a run's configuration, metrics, tables and end, beside its own files.

`run.loggers` names them. The console, `metrics.jsonl` and the report are not loggers: every run has
them (`treadle.trainer.report`).

    run_logger.py     the interface of a logger, and the data it gets
    named.py          the table of loggers by name, and how your own is loaded
    to_wandb.py, to_tensorboard.py, to_mlflow.py, to_trackio.py: one client each
    process.py        the process of one logger, beside the driver
    logger_process.py the driver's side of it: a bounded queue, and a limit at the end
    loggers.py        all loggers of a run
    secrets.py        what is left out of a configuration that leaves the machine
    generations.py    the table of a validation's trajectories
"""
