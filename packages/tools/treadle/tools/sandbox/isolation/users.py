"""The users that sandboxes run as, outside, when root starts them: each has one for itself.

Invariant: no two sandboxes of a `Users` run as the same user at one time. The kernel counts some
things for each user of the host, in whatever namespaces: descriptors in flight between sockets,
the memory of pipes. Sandboxes of one user would take them from each other.

Who waits: nobody.
"""

from __future__ import annotations

import pwd
import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from treadle.agent_loop import SetupError

_RANGES: Final = (range(65_536, 100_000), range(61_184, 65_534))
"""Ids that nobody is given: above what systems use and below what `subuid` begins with; and, for
containers without those, what is left of the ids of 16 bits."""
_MAPS: Final = (Path("/proc/self/uid_map"), Path("/proc/self/gid_map"))


class Users:
    """Ids of users, and of groups of the same number, to be taken and given back.

    Raises:
        SetupError: This user namespace has fewer to spare.
    """

    def __init__(self, number: int) -> None:
        named = {entry.pw_uid for entry in pwd.getpwall()}
        for ids in _RANGES:
            free = [number for number in _mapped(ids) if number not in named]
            if len(free) >= number:
                # At random: another sandbox of this host would begin at the same one.
                self._spare = deque(random.sample(free, number))
                return
        raise SetupError(
            f"as root the sandbox needs {number} user ids that nobody has, one for each place and "
            "warm interpreter, and this user namespace has fewer between 61184 and 99999; start "
            "it with fewer, or run as another user"
        )

    def take(self) -> int:
        """Returns the id that was given back longest ago."""
        return self._spare.popleft()

    def give_back(self, user: int) -> None:
        """No process of the user is left."""
        self._spare.append(user)


def _mapped(ids: range) -> Iterator[int]:
    """Yields those that exist in this user namespace, as users and as groups."""
    lines = [[line.split() for line in path.read_text().splitlines()] for path in _MAPS]
    parts = [[range(int(a), int(a) + int(n)) for a, _, n in about] for about in lines]
    return (i for i in ids if all(any(i in part for part in about) for about in parts))
