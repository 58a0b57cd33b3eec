from pathlib import Path

from treadle.trainer.config.schema import Config, DataConfig, ModelConfig, ScheduleConfig
from treadle.trainer.plan import make_plan
from treadle.trainer.training_loop.build_context import total_steps


def _total_steps(schedule: ScheduleConfig, *, rows_left: int) -> tuple[int, list[str]]:
    """Returns the steps of a run with 11 rows, 2 per step, and the notes about them."""
    config = Config(
        data=DataConfig(train_files=(Path("t.jsonl"),), prompts_per_step=2),
        model=ModelConfig(path=Path("m")),
        schedule=schedule,
    )
    notes: list[str] = []
    plan = make_plan(config, num_train_rows=11, num_val_rows=0, cpus=1)
    return total_steps(plan, rows_left, notes.append), notes


def test_an_epoch_is_as_long_as_the_rows_that_are_left() -> None:
    epochs = ScheduleConfig(total_epochs=3)
    assert _total_steps(epochs, rows_left=11) == (15, [])
    assert _total_steps(epochs, rows_left=6) == (
        9,
        ["9 steps, not 15: 6 of 11 training rows are left"],
    )
    assert _total_steps(ScheduleConfig(total_steps=20), rows_left=6) == (20, [])
