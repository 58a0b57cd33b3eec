"""Harbor's environment over the bubblewrap sandbox: a room in place of a container.

    environment:
      import_path: treadle.tools.environments.harbor.environment:SandboxEnvironment

Invariant: every file that passes between host and room goes through a process in the room. Commands
run as user 0; a task that needs another user is refused.
"""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path, PurePosixPath
from typing import Any

from harbor.environments.base import (
    BaseEnvironment,
    ExecResult,
    SandboxBuildFailedError,
)
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.task.config import NetworkMode

from treadle.tools.environments.harbor.files import find_sources, pack, pack_command, unpack
from treadle.tools.environments.harbor.image import BuildStep, UnsupportedTaskError, read_image
from treadle.tools.sandbox.limits import SandboxLimits
from treadle.tools.sandbox.room import ROOM_LIMITS, Room

_ROOT = (None, "root", "0", 0)


class SandboxEnvironment(BaseEnvironment):
    """A room with this machine's system, prepared by the steps of the task's Dockerfile.

    Args:
        network: "host": commands have the host's network, unless the task forbids one.
        images: Images that this machine's system stands for.
        limits: Bounds of the room; None: `ROOM_LIMITS`.
    """

    def __init__(
        self,
        *args: Any,
        network: str = "none",
        images: tuple[str, ...] = (),
        limits: SandboxLimits | None = None,
        **kwargs: Any,
    ) -> None:
        self._with_network = network == "host"
        self._images = images
        self._limits = limits or ROOM_LIMITS
        self._room: Room | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        """Returns the environment's name in Harbor's results."""
        return "treadle-sandbox"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """The environment can disable the network; it has none of Harbor's other capabilities."""
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        self._image = read_image(
            self.environment_dir,
            self.task_env_config.docker_image,
            images=self._images,
            network=self._with_network,
        )

    async def start(self, force_build: bool) -> None:
        """Opens the room and runs the build steps of the Dockerfile."""
        if self._host_mounts:
            raise ValueError("mounts are not supported: files are copied in and out of the sandbox")
        public = self.network_policy.network_mode == NetworkMode.PUBLIC
        room = Room(limits=self._limits, network=self._with_network and public)
        self._room = await room.__aenter__()
        await room.run(["mkdir", "-p", self._workdir])
        await self.ensure_dirs(self._mount_targets(writable_only=True))
        for step in self._image.steps:
            await self._do(step)
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        """Ends every process of the room and deletes its files, with or without `delete`."""
        room, self._room = self._room, None
        if room is not None:
            await room.__aexit__()

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Runs a command by bash.

        Raises:
            RuntimeError: It ran longer than `timeout_sec`, or its user is not root.
        """
        if (wanted := self._resolve_user(user)) not in _ROOT:
            raise RuntimeError(f"the task wants user {wanted!r}; the sandbox has root only")
        result = await self._opened.run(
            ["bash", "-c", command],
            cwd=cwd or self._workdir,
            environment={**self._image.environment, **(self._merge_env(env) or {})},
            timeout_s=timeout_sec,
        )
        if result.timed_out:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        out, err = (data.decode(errors="replace") for data in (result.stdout, result.stderr))
        if (emit := self._output_callback()) is not None:
            await emit(out, "stdout")
            await emit(err, "stderr")
        return ExecResult(stdout=out, stderr=err, return_code=result.return_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copies a file into the room."""
        target = PurePosixPath(target_path)
        await self._unpack(pack(target.name, Path(source_path)), str(target.parent))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copies what a folder holds into one of the room."""
        await self._unpack(pack(".", Path(source_dir)), target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copies a file out of the room."""
        data = await self._read(["cat", "--", source_path])
        await asyncio.to_thread(_write, Path(target_path), data)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copies what a folder of the room holds.

        Special files, unreadable ones and links that lead out of it are left out.
        """
        data = await self._read(pack_command(source_dir), accepted=(0, 1))
        await asyncio.to_thread(unpack, data, Path(target_dir))

    @property
    def _opened(self) -> Room:
        if self._room is None:
            raise RuntimeError("the environment is not started")
        return self._room

    @property
    def _workdir(self) -> str:
        return self.task_env_config.workdir or self._image.workdir

    async def _do(self, step: BuildStep) -> None:
        await self._opened.run(["mkdir", "-p", step.workdir])
        if step.command:
            result = await self._opened.run(
                step.command, cwd=step.workdir, environment=step.environment
            )
            if result.return_code:
                words = result.stderr.decode(errors="replace")[-1000:]
                raise SandboxBuildFailedError(f"{step.text!r:.200} failed: {words}")
            return
        *sources, target = step.copied
        for pattern in sources:
            try:
                found = find_sources(self.environment_dir, pattern)
            except UnsupportedTaskError as error:
                raise SandboxBuildFailedError(f"{step.text!r:.200}: {error}") from error
            for name, path in found:
                if path.is_dir():
                    await self.upload_dir(path, target)
                elif target.endswith("/") or await self.is_dir(target):
                    await self.upload_file(path, f"{target.rstrip('/')}/{name}")
                else:
                    await self.upload_file(path, target)

    async def _unpack(self, data: bytes, target: str) -> None:
        place = shlex.quote(target)
        command = f"mkdir -p {place} && tar -x --no-same-owner -C {place}"
        result = await self._opened.run(["bash", "-c", command], stdin=data)
        if result.return_code:
            raise RuntimeError(f"cannot upload to {target}: {result.stderr.decode()[-500:]}")

    async def _read(self, argv: list[str], accepted: tuple[int, ...] = (0,)) -> bytes:
        result = await self._opened.run(argv)
        if result.return_code not in accepted:
            raise FileNotFoundError(f"cannot download: {result.stderr.decode()[-500:]}")
        return result.stdout


def _write(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
