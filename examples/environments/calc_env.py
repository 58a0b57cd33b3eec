"""An environment of verifiers that knows nothing of Treadle: sums, a calculator, a rubric."""

import random
import re
from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["CalcTaskset"]


class CalcData(vf.TaskData):
    """A question with its answer."""

    answer: int


class CalcTask(vf.Task[CalcData]):
    """Right or wrong, by the last number that the model wrote."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Returns 1 for the answer."""
        numbers = re.findall(r"-?\d+", trace.last_reply)
        return float(bool(numbers) and int(numbers[-1]) == self.data.answer)


class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    """One server for all tasks."""

    TOOL_PREFIX = None

    @vf.tool
    async def calculator(self, expression: str) -> str:
        """Evaluate a sum, such as 2+3."""
        numbers = re.findall(r"\d+", expression)
        return str(sum(map(int, numbers)))


class CalcConfig(vf.TasksetConfig):
    """Which sums there are."""

    highest: int = 99
    num_tasks: int = 256


class CalcTaskset(vf.Taskset[CalcTask, CalcConfig]):
    """Sums of two numbers, the same each time."""

    def load(self) -> Iterable[CalcTask]:
        """Yields the tasks."""
        draw = random.Random(0)
        for _ in range(self.config.num_tasks):
            a, b = draw.randint(1, self.config.highest), draw.randint(1, self.config.highest)
            yield CalcTask(CalcData(prompt=f"What is {a} + {b}?", answer=a + b), self.config.task)

    @classmethod
    def toolsets(cls, config: CalcConfig) -> list[vf.Toolset]:
        """Returns the calculator."""
        return [Calculator(vf.SharedToolsetConfig())]


if __name__ == "__main__":
    Calculator.run()
