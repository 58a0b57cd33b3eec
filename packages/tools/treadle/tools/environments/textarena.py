"""TextArena's games, alone or in self-play (extra `textarena`).

    textarena: KuhnPoker-v0
    players: 2                           # 1 by default; all of them are the policy
    arguments: {max_rounds: 1}

The reward of a player is the game's, at its end; a game that a limit cut short gives 0. With one
player, the trajectory has one conversation. In self-play each player has a conversation, and so a
sample, with a reward (`Trajectory.sample_rewards`): it is compared with that player's rewards in
the group's other trajectories. The player whose turn was too long gets -1; otherwise a policy
learns to talk on where it would lose. The trajectory's own reward, which is logged, is player 0's.

A conversation shows what happened since the player's last turn; where a game repeats the whole
history with each turn, only the new part is read.

TextArena draws from Python's global `random`. Each game has a state of it, which is there while the
game computes, so games at the same time do not disturb each other. Games compute on the event loop.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from treadle.agent_loop import (
    AgentTask,
    Conversation,
    LoopError,
    Message,
    SampleReward,
    Services,
    SetupError,
    StopReason,
    Trajectory,
)
from treadle.tools.arguments import require_extra
from treadle.tools.environments.settings import (
    COMMON,
    EnvironmentSettings,
    seed_of,
    seeded_rows,
    settings_of,
)
from treadle.tools.environments.text_game import beginning, ended, take_turn, turn_stop
from treadle.tracing import Metric, span

KEYS: Final = (*COMMON, "players")
"""The keys of its YAML file, besides the library's."""

_LIBRARY: Final = "textarena"
_LOOP: Final = f"{__name__}:TextArenaLoop"
_CUT: Final = (StopReason.TURN_LENGTH, StopReason.RESPONSE_LENGTH, StopReason.CONTEXT_LENGTH)
_FORFEIT: Final = -1.0


def rows(settings: EnvironmentSettings) -> Iterator[Mapping[str, object]]:
    """Yields the rows of a game, one per seed.

    Raises:
        SetupError: There is no such game, it cannot be played by so many, or a setting is wrong.
    """
    require_extra(settings.where, "textarena", "textarena")
    try:
        _Game(settings, seed=settings.count("first_seed", 0, at_least=0)).close()
    except LoopError as error:
        raise SetupError(str(error)) from error
    yield from seeded_rows(settings, _LOOP)


class TextArenaLoop:
    """Plays one game per task, with the policy as every player."""

    scores_itself = True

    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        """Attempts the task once.

        Raises:
            RolloutError: The attempt failed.
        """
        settings, extra = settings_of(task, _LIBRARY)
        game = _Game(settings, seed=seed_of(extra))
        player, shown = game.next_turn()
        with Conversation(beginning(task, shown), services) as first:
            chats = {player: first}
            while True:
                chat = chats[player]
                if stop := await take_turn(chat):
                    break
                async with span("environment.step", player=player) as trace:
                    done = game.step(chat.messages[-1].content)
                    trace.set(output={"done": done})
                if done:
                    stop = StopReason.FINISHED
                    break
                player, shown = game.next_turn()
                if stop := turn_stop(chat, services.limits):
                    break
                message = Message(role="user", content=shown)
                if player not in chats:
                    chats[player] = first.another((*task.messages[:-1], message))
                elif stop := chats[player].answer([message]):
                    break
            rewards = game.close() if stop is StopReason.FINISHED else {}
            if stop in _CUT and game.num_players > 1:
                rewards = {player: _FORFEIT}
            return _finish(chats, stop, rewards, game)


def _finish(
    chats: Mapping[int, Conversation],
    stop: StopReason,
    rewards: Mapping[int, float],
    game: _Game,
) -> Trajectory:
    """Freezes the trajectory; its samples are the players', in the order of their first turns."""
    spoken = {player: chat for player, chat in chats.items() if chat.assistant_turns}
    last = list(spoken.values())[-1]
    of_players = {player: float(rewards.get(player, 0.0)) for player in range(game.num_players)}
    metrics = [ended(stop is StopReason.FINISHED)]
    sample_rewards: tuple[SampleReward, ...] = ()
    if game.num_players > 1:
        metrics += [
            Metric(f"environment/reward_player_{player}", reward)
            for player, reward in of_players.items()
        ]
        sample_rewards = tuple(
            SampleReward(player=str(player), value=of_players[player]) for player in spoken
        )
    return last.finish(stop, reward=of_players[0], sample_rewards=sample_rewards, metrics=metrics)


class _Game:
    """A game in progress, with its own state of the global random numbers."""

    def __init__(self, settings: EnvironmentSettings, *, seed: int) -> None:
        import textarena

        self.num_players = settings.count("players", 1)
        self._random: Any = None
        arguments = settings.mapping("arguments")
        try:
            with self._own_random():
                self._game = textarena.make(settings.name, **arguments)
                self._game.reset(num_players=self.num_players, seed=seed)
        except Exception as error:  # games check the number of players with assertions
            raise LoopError(
                f"{settings.where}: the game cannot begin with players={self.num_players}: "
                f"{type(error).__name__}: {error}"
            ) from error
        self._inner = self._game
        while hasattr(self._inner, "env"):  # wrappers repeat the history in each observation
            self._inner = self._inner.env

    def next_turn(self) -> tuple[int, str]:
        """Returns the player whose turn it is, and what it has not seen yet."""
        with self._own_random():
            player, seen = self._inner.get_observation()
        names = self._inner.state.role_mapping
        lines = [
            text.strip() if sender == -1 else f"[{names.get(sender, sender)}] {text.strip()}"
            for sender, text, _ in seen
            if sender != player  # its own words are its turns
        ]
        return player, "\n".join(lines) or "It is your turn."

    def step(self, text: str) -> bool:
        """Takes the turn of the player; returns whether the game is over."""
        with self._own_random():
            done, _ = self._game.step(text)
        return bool(done)

    def close(self) -> Mapping[int, float]:
        """Ends the game; returns the reward of each player, empty before the game's own end."""
        rewards, _ = self._game.close()
        return rewards or {}

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        others = random.getstate()
        if self._random is not None:
            random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(others)
