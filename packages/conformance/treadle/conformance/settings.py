"""What the kit was told, made ready: channels, tokens, and the two sets of weights.

Invariant: settings that exist can be used: their files were read, and what they need is
installed. The second set of weights is made of the first, by turning the rows of every matrix
half around, so that it has the same shapes and the same sizes of numbers, and nothing but
copying bytes is needed.
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
    """The kit cannot run as it was told to; the message is for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """See the options of the command line.

    Attributes:
        target: The server.
        files: The directory that its file transport reads, as it is called here.
        compared: Whether transformers is to compute the same model.
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
        """host:port of the server."""
        return self.target.address

    @property
    def on_loopback(self) -> bool:
        """Whether the server is reached on this machine only."""
        try:
            return Address.parse(self.address).on_loopback
        except ValueError:  # Another name that gRPC understands.
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


def resolve(options: argparse.Namespace, scratch: Path) -> Settings:
    """Reads what the options name.

    Args:
        options: Of the command line.
        scratch: A directory, not yet there, for the second set of weights.

    Raises:
        Unusable: A file cannot be read, or will have no place.
    """
    if options.json is not None and not options.json.parent.is_dir():
        raise Unusable(f"--json {options.json}: there is no directory {options.json.parent}")
    ca = _read(options.ca, "--ca")
    token = _read(options.token_file, "--token-file")
    bearer = () if token is None else (("authorization", f"Bearer {token.decode().strip()}"),)
    directory: Path | None = options.model or options.weights
    if directory is not None and not any(directory.glob("*.safetensors")):
        raise Unusable(f"{directory} holds no *.safetensors: name the directory that is served")
    return Settings(
        target=Target(
            address=options.address,
            channel=plain_channel if ca is None else partial(tls_channel, ca),
            metadata=bearer,
            checkpoints=None if directory is None else (directory, turned(directory, scratch)),
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


async def handshake(settings: Settings) -> srv.GetServerInfoResponse:
    """The server's first answer.

    Raises:
        Unusable: It gives none, or serves nothing.
    """
    answer = await _answer(settings)
    if answer.state != srv.SERVER_STATE_SERVING:
        state = srv.ServerState.Name(answer.state)
        raise Unusable(
            f"{settings.address} is {state}, expected SERVER_STATE_SERVING: let it serve first"
        )
    return answer


async def lost(settings: Settings) -> str | None:
    """Why the server is of no use any more; None: the next check finds one."""
    try:
        state = (await _answer(settings)).state
    except Unusable as error:
        return str(error)
    if state in (srv.SERVER_STATE_FAILED, srv.SERVER_STATE_STOPPING):
        return f"{settings.address} is {srv.ServerState.Name(state)}"
    return None


async def _answer(settings: Settings) -> srv.GetServerInfoResponse:
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


def turned(source: Path, destination: Path) -> Path:
    """Writes the second set of weights.

    Args:
        source: A Hugging Face directory.
        destination: Made here.
    """
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
        raise Unusable(f"{option} {path} is no directory: name the server's --weights.directory")
    return path


def _read(path: Path | None, option: str) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise Unusable(f"{option} {path}: {error.strerror}") from None


def lacking(settings: Settings, server: srv.GetServerInfoResponse) -> dict[str, str]:
    """The parts that cannot run against this server from here, and why."""
    model = "" if settings.compared else "needs the model that it serves: give --model"
    group = "" if server.capabilities.collective_transport else "it joins no collective groups"
    found = {
        "model": model or _not_installed("torch", "transformers"),
        "group": group or _not_installed("torch"),
    }
    return {part: why for part, why in found.items() if why}


def _not_installed(*names: str) -> str:
    absent = [name for name in names if not importlib.util.find_spec(name)]
    return f"needs {' and '.join(absent)}: install it here" if absent else ""
