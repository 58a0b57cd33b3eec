"""A task in one file: rows, a tool with state, and the reward."""

import random
import re
from collections.abc import Iterator

from treadle.agent_loop import ToolFailure

SYSTEM = "Solve the problem. End with #### <answer>."


class Shop:
    """The calculator of one trajectory; the row gives the answer."""

    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.results: list[int] = []

    def calculator(self, expression: str) -> str:
        """Evaluate arithmetic."""
        match = re.fullmatch(r"(\d{1,9})([-+*])(\d{1,9})", expression.replace(" ", ""))
        if match is None:
            raise ToolFailure("write two whole numbers with +, - or * between them, such as 12*7")
        a, sign, b = int(match[1]), match[2], int(match[3])
        self.results.append(a + b if sign == "+" else a - b if sign == "-" else a * b)
        return str(self.results[-1])

    def reward(self) -> dict[str, float]:
        """Returns 1 if a result was the answer, and the number of calls as a metric."""
        return {"score": float(self.answer in self.results), "calls": len(self.results)}


def rows() -> Iterator[dict[str, object]]:
    """Yields what the model is asked, and what the class takes of a row."""
    draw = random.Random(0)
    for _ in range(192):
        a, b = draw.randint(11, 99), draw.randint(2, 10)
        question = f"A ticket costs {a} coins. What do {b} tickets cost?"
        prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        yield {"prompt": prompt, "answer": a * b}
