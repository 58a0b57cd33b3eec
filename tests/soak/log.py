"""What a soak did and found: lines for a person, and one JSON object per event for a replay."""

import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

_KILLED = "killed"


class Log:
    """Counts faults, bad requests and violations, and writes each fault and violation down.

    Attributes:
        violations: What should not have happened, as sentences.
        counts: How often each event was written or counted, by what it is about.
    """

    def __init__(self, path: Path) -> None:
        """Args: path: The file of JSON lines; it is begun anew."""
        self.violations: list[str] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def write(self, event: str, about: str, *, shown: bool = True, **more: Any) -> None:
        """Writes an event to the file, and to standard output if it is `shown`."""
        with self._lock:
            at = round(time.monotonic() - self._began, 3)
            self.counts[event, about] += 1
            self._file.write(json.dumps({"at_s": at, "event": event, "about": about, **more}))
            self._file.write("\n")
            if shown:
                told = ", ".join(f"{key} {value}" for key, value in more.items())
                sys.stdout.write(f"{at:8.1f} s  {event}: {about}{f' ({told})' if told else ''}\n")
                sys.stdout.flush()

    def say(self, sentence: str) -> None:
        """Prints what is going on, for who waits."""
        with self._lock:
            sys.stdout.write(f"{time.monotonic() - self._began:8.1f} s  {sentence}\n")
            sys.stdout.flush()

    def count(self, event: str, about: str, number: int = 1) -> None:
        """Counts an event that is not worth a line."""
        with self._lock:
            self.counts[event, about] += number

    def killed(self, schedule: str, process: str, number: int) -> None:
        """Counts processes that were killed."""
        self.count(f"{_KILLED} with {schedule}", process, number)

    @property
    def num_killed(self) -> int:
        """Number of processes that were killed."""
        return sum(n for (event, _), n in self.counts.items() if event.startswith(_KILLED))

    def violation(self, sentence: str) -> None:
        """Writes down what should not have happened."""
        self.violations.append(sentence)
        self.write("VIOLATION", sentence)

    def summary(self) -> str:
        """Returns the counts as a table, then the violations."""
        lines = [
            f"  {number:6d}  {event}: {about}"
            for (event, about), number in sorted(self.counts.items())
            if event != "VIOLATION"
        ]
        found = len(self.violations)
        lines += [f"{found} violations", *(f"  {sentence}" for sentence in self.violations)]
        return "\n".join(lines)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
