"""An environment that OpenEnv serves: say more vowels than the seed asks for.

python openenv_server.py 8000
"""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Say(Action):
    """What the model said."""

    message: str


class Heard(Observation):
    """What the model is shown."""

    text: str


class Vowels(Environment[Say, Heard, State]):
    """Two turns; each gives half a point if it has enough vowels."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._wanted = 0
        self._state = State(step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Heard:
        """Begins: the seed chooses how many are wanted."""
        self._wanted = 1 + (seed or 0) % 5
        self._state = State(episode_id=episode_id, step_count=0)
        return Heard(text=f"Say {self._wanted} vowels.")

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Heard:
        """Counts the vowels."""
        self._state.step_count += 1
        found = sum(letter in "aeiou" for letter in action.message.lower())
        return Heard(
            text=f"{found} of {self._wanted}.",
            reward=0.5 * (found >= self._wanted),
            done=self._state.step_count == 2,
        )

    @property
    def state(self) -> State:
        """Returns the number of turns."""
        return self._state


if __name__ == "__main__":
    app = create_app(Vowels, Say, Heard, env_name="vowels", max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
