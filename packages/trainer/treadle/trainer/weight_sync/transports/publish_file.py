"""Publishing by file: the ranks write; Begin, with the checksums, makes the servers read; Commit.

Invariant: the files of an attempt are removed when it ends, however it ends. Servers that could not
read them get them written again, under a new update, while the others already serve.
"""

import asyncio
import shutil
import uuid
from pathlib import Path
from typing import cast

from treadle.trainer.policy.commands import SendReport, WriteFiles
from treadle.trainer.weight_sync.client import WeightSyncClient
from treadle.trainer.weight_sync.errors import Outcome
from treadle.trainer.weight_sync.update_round import Round

__all__ = ["publish_files", "send_files"]


async def publish_files(round_: Round, directory: Path) -> None:
    """Leaves in `round_.live` the servers that sample from the version.

    Args:
        round_: Under way.
        directory: Where the files go; the servers can read below it.

    Raises:
        WeightSyncError: trainer and servers do not fit.
        PolicyError: a policy rank failed.
    """
    attempts = round_.config.max_push_attempts
    done: dict[str, WeightSyncClient] = {}
    for attempt in range(attempts):
        await send_files(round_, directory, last=attempt + 1 == attempts)
        await round_.commit()
        done |= round_.live
        if not round_.refused:
            break
        round_.live, round_.refused = round_.refused, {}
        round_.update_id = uuid.uuid4().hex
    round_.live = done


async def send_files(round_: Round, directory: Path, *, last: bool = False) -> None:
    """Leaves in `round_.live` the servers that have read every byte.

    Those that could not are in `round_.refused`; where it is the `last` attempt, they fail.
    """
    changes = round_.changes
    folder = directory / round_.update_id
    command = WriteFiles(
        directory=folder,
        element_type=round_.element_type,
        version=round_.version,
        base_version=None if changes is None else changes.base_version,
    )
    try:
        reports = cast("list[SendReport]", await round_.policy.call(command))
        checksums = {name: crc for report in reports for name, crc in report.crc32.items()}
        request = round_.announcement()
        request.file.directory = str(folder)
        request.file.crc32.extend(checksums[spec.name] for spec in round_.specs)
        await round_.begin(request, again=None if last else Outcome.RESTART)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
