"""Turns the command line into settings: channels, tokens, and the two sets of weights.

Invariant: settings that exist are usable; their files have been read. The second set of weights
is the first with the rows of every matrix rotated by half. It has the same shapes and magnitudes,
and making it only copies bytes.
"""

import argparse
import importlib.util
import mmap
import shutil
import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc.aio

from treadle.conformance.client.stubs import stubs_for
from treadle.conformance.contracts.remote_contract import (
    Target,
    plain_channel,
    tls_channel,
)
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout_server.address import Address
from treadle.rollout_server.safetensors_file import read_header

CONNECT_S = 10.0


class Unusable(ValueError):
    """The kit cannot run with these options; the message is for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KitSettings:
    """The settings of a run; for the other fields see the command line.

    Attributes:
        files: The directory that its file transport reads, as a path on this machine.
        compared: Whether to compare the model with transformers.
    """

    target: Target
    files: Path | None
    compared: bool
    tolerance: float
    continue_recomputes: bool
    caches_prefixes: bool
    places: int | None
    long: int
    draws: int

    @property
    def address(self) -> str:
        """The host:port of the server."""
        return self.target.address

    @property
    def on_loopback(self) -> bool:
        """Whether the address is reachable from this machine only."""
        try:
            return Address.parse(self.address).on_loopback
        except ValueError:  # Another form that gRPC understands, such as unix:path.
            return False

    def local_host(self) -> str:
        """Returns this machine's address as the server reaches it."""
        if self.on_loopback:
            return "127.0.0.1"
        host, port = Address.parse(self.address)
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # Finds a route; nothing is sent.
            return str(probe.getsockname()[0])


def resolve(options: argparse.Namespace, scratch: Path) -> KitSettings:
    """Returns the settings that the options name.

    Args:
        scratch: Directory to create for the second set of weights.

    Raises:
        Unusable: A file cannot be read, or cannot be written later.
    """
    check_output(options)
    ca = read_file(options.ca, "--ca")
    token = read_file(options.token_file, "--token-file")
    bearer = () if token is None else (("authorization", f"Bearer {token.decode().strip()}"),)
    directory: Path | None = options.model or options.weights
    if directory is not None and not any(directory.glob("*.safetensors")):
        raise Unusable(
            f"{directory} has no *.safetensors: name the directory that the server serves"
        )
    return KitSettings(
        target=Target(
            address=options.address,
            channel=plain_channel if ca is None else partial(tls_channel, ca),
            metadata=bearer,
            checkpoints=None
            if directory is None
            else (directory, write_rotated(directory, scratch)),
        ),
        files=_directory(options.files, "--files"),
        compared=options.model is not None,
        tolerance=options.tolerance,
        continue_recomputes=options.continue_recomputes,
        caches_prefixes=not options.no_prefix_cache,
        places=options.places,
        long=options.long,
        draws=options.draws,
    )


def check_output(options: argparse.Namespace) -> None:
    """Raises `Unusable` if the result cannot be written."""
    if options.json is not None and not options.json.parent.is_dir():
        raise Unusable(f"--json {options.json}: directory {options.json.parent} does not exist")


async def handshake(settings: KitSettings) -> srv.GetServerInfoResponse:
    """Returns the server's answer to GetServerInfo.

    Raises:
        Unusable: It does not answer, or is not serving.
    """
    answer = await _answer(settings)
    if answer.state != srv.SERVER_STATE_SERVING:
        state = srv.ServerState.Name(answer.state)
        raise Unusable(
            f"{settings.address} is {state}, expected SERVER_STATE_SERVING: wait until it serves"
        )
    return answer


async def why_lost(settings: KitSettings) -> str | None:
    """Returns why no more checks can run on the server, or None if they can."""
    try:
        state = (await _answer(settings)).state
    except Unusable as error:
        return str(error)
    if state in (srv.SERVER_STATE_FAILED, srv.SERVER_STATE_STOPPING):
        return f"{settings.address} is {srv.ServerState.Name(state)}"
    return None


async def _answer(settings: KitSettings) -> srv.GetServerInfoResponse:
    address = settings.address
    async with settings.target.channel(address) as channel:
        try:
            stubs = stubs_for(channel, settings.target.metadata)
            request = srv.GetServerInfoRequest(client="conformance")
            answer = await stubs.control.GetServerInfo(request, timeout=CONNECT_S)
        except grpc.aio.AioRpcError as error:
            raise Unusable(
                f"{address} does not answer GetServerInfo: {error.code().name}, {error.details()}"
            ) from None
    assert isinstance(answer, srv.GetServerInfoResponse)
    return answer


def write_rotated(source: Path, destination: Path) -> Path:
    """Writes the second set of weights and returns its directory."""
    shutil.copytree(source, destination)
    for path in destination.glob("*.safetensors"):
        path.chmod(0o600)
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            for stored in read_header(path):
                shape = stored.spec.shape
                if len(shape) < 2:
                    continue
                half = stored.spec.size_bytes // shape[0] * (shape[0] // 2)
                stop = stored.start + stored.spec.size_bytes
                whole = data[stored.start : stop]
                data[stored.start : stop] = whole[half:] + whole[:half]
    return destination


def _directory(path: Path | None, option: str) -> Path | None:
    if path is not None and not path.is_dir():
        raise Unusable(f"{option} {path} is not a directory: name the server's --weights.directory")
    return path


def read_file(path: Path | None, option: str) -> bytes | None:
    """Returns the content of an option's file; None if the option is not given.

    Raises:
        Unusable: It cannot be read.
    """
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise Unusable(f"{option} {path}: {error.strerror}") from None


def skipped_parts(settings: KitSettings, info: srv.GetServerInfoResponse) -> dict[str, str]:
    """Returns the parts that cannot run against this server from here, with the reasons."""
    model = "" if settings.compared else "needs the model that the server serves: set --model"
    group = (
        "" if info.capabilities.collective_transport else "the server joins no collective groups"
    )
    found = {
        "model": model or _not_installed("torch", "transformers"),
        "group": group or _not_installed("torch"),
    }
    return {part: why for part, why in found.items() if why}


def _not_installed(*names: str) -> str:
    absent = [name for name in names if not importlib.util.find_spec(name)]
    return f"needs {' and '.join(absent)}: install it in the kit's environment" if absent else ""
