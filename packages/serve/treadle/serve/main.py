"""`treadle serve MODEL`: the HTTP API of Tinker's SDK, on this machine.

Exit status: 0, it was interrupted; 2, the input is wrong; 1, the work failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.trainer.cli.console import fail, say
from treadle.trainer.cli.interrupt import Interrupted, until_signal

if TYPE_CHECKING:
    from treadle.trainer.config.schema import Config

__all__ = ["main"]

_ADDRESS = "127.0.0.1:8000"
_CONTEXT = 8192
_COUNTS = (
    ("--max-models", 64, "models at a time"),
    ("--max-session-models", None, "of one session"),
    ("--max-session-requests", 4096, "of one session to train, and to sample, not yet answered"),
    ("--max-policies", 2, "sets of ranks for models of other LoRA ranks or matrices"),
)
"""Options that are numbers: what each is if left out, and what it limits."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="treadle serve",
        description="Serves the HTTP API of Tinker's SDK: training and sampling of adapters, with "
        "policy ranks and rollout servers as a run starts them.",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="as model.path takes it, such as demo:calculator"
    )
    parser.add_argument("--address", default=_ADDRESS, metavar="HOST:PORT", help=f"{_ADDRESS}")
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path("runs/serve"),
        metavar="DIR",
        help="its state; a server that is started there again goes on; runs/serve if left out",
    )
    parser.add_argument(
        "--name", metavar="NAME", help="what clients call the base model; MODEL if left out"
    )
    for name, default, text in _COUNTS:
        said = f"{text}; {default or 'as --max-models'} if left out"
        parser.add_argument(name, type=int, default=default, metavar="N", help=said)
    parser.add_argument("--tls-certificate", type=Path, metavar="FILE", help="PEM")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="of policy, rollout, sync and launch"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until it is interrupted; returns the exit status."""
    from treadle.trainer.launch.process import ProcessError
    from treadle.trainer.preflight.table import INPUT_ERRORS
    from treadle.trainer.rollout.server_pool import NoServerLeftError

    args = _parser().parse_intermixed_args(argv)
    try:
        config = _config(args.model, args.overrides)
        asyncio.run(until_signal(_serve(args, config)))
    except (*INPUT_ERRORS, ValueError) as error:
        return fail(error)
    except (NoServerLeftError, ProcessError) as error:
        return fail(error, status=1)
    except Interrupted:
        say("interrupted; start it again with the same --dir to go on")
    return 0


def _config(model: str, overrides: Sequence[str]) -> Config:
    """Returns the configuration, with the model on this machine.

    Raises:
        SetupError: The model, a setting or the servers' command cannot be used.
    """
    from treadle.trainer.config.load import load_config
    from treadle.trainer.model_source import resolve_model, with_model
    from treadle.trainer.preflight.model_checks import with_backend
    from treadle.trainer.rollout.engine_checks import (
        check_engine_settings,
        check_training_features,
    )
    from treadle.trainer.rollout.server_process import check_server_command

    path = resolve_model(model)
    longest = json.loads((path / "config.json").read_text(encoding="utf-8"))
    longest = longest.get("text_config", longest).get("max_position_embeddings", _CONTEXT)
    context = min(int(longest), _CONTEXT)
    below = [
        "data.train_files=none",
        f"model.path={json.dumps(model)}",
        "policy.lora.alpha=32",
        f"rollout.prompt_length={context - context // 2}",
        f"rollout.response_length={context // 2}",
    ]
    config, _ = with_backend(with_model(load_config([], overrides, below=below).config, path))
    check_server_command(config)
    check_engine_settings(config)
    check_training_features(config)
    return config


async def _serve(args: argparse.Namespace, config: Config) -> None:
    from treadle.agent_loop.hf import HfRenderer
    from treadle.agent_loop.proxy.server import SharedServer, TlsFiles, check_exposure
    from treadle.agent_loop.rpc import Requirements
    from treadle.serve.app import make_app
    from treadle.serve.errors import Limits
    from treadle.serve.policies import Policies
    from treadle.serve.record import Records
    from treadle.serve.sampling import Sampler
    from treadle.serve.service import Service
    from treadle.serve.store import Store
    from treadle.serve.training import Models
    from treadle.trainer.checkpoint.run_directory import RunDirectory
    from treadle.trainer.launch.make_launcher import make_launcher
    from treadle.trainer.rollout.server_pool import ServerPool, required_capabilities
    from treadle.trainer.rollout.server_security import with_own_secrets

    host, _, port = args.address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal():
        raise ValueError(f"--address {args.address}: give HOST:PORT, such as {_ADDRESS}")
    tls = None
    if args.tls_certificate is not None and args.tls_key is not None:
        tls = TlsFiles(certificate=args.tls_certificate, key=args.tls_key)
    check_exposure(host, tls=tls, allow="choose a tunnel", allowed=False)
    directory: Path = args.dir
    model = json.loads((config.model.path / "config.json").read_text(encoding="utf-8"))
    async with AsyncExitStack() as stack:
        stack.enter_context(RunDirectory(directory))
        logs = directory / "logs"
        logs.mkdir(exist_ok=True)
        handler = logging.FileHandler(logs / "serve.log", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger("treadle").addHandler(handler)
        key = _key(directory / "key")
        store = Store(directory)
        stack.callback(store.close)
        launcher = await stack.enter_async_context(make_launcher(config, logs))
        secured = stack.enter_context(with_own_secrets(config, directory, launcher.tls))
        policies = Policies(secured, store, limit=args.max_policies)
        stack.push_async_callback(policies.close)
        renderer = HfRenderer.from_directory(config.model.path)
        at_once = config.rollout.max_in_flight * max(1, config.rollout.num_replicas)
        limits = Limits(
            models=args.max_models,
            session_models=args.max_session_models or args.max_models,
            session_requests=args.max_session_requests,
        )
        records = Records(directory / "runs", renderer, config.model.path)
        stack.push_async_callback(records.close)
        sampler = Sampler(store, policies, renderer, records, at_once=at_once, limits=limits)
        pool = ServerPool(
            launcher,
            secured,
            publish=sampler.publish,
            weights_directory=(directory / "weights").resolve(),
        )
        await stack.enter_async_context(pool)
        needs = frozenset(required_capabilities(config))
        await pool.connect(
            Requirements(context_length=config.rollout.context_length, capabilities=needs)
        )
        models = Models(
            store,
            policies,
            vocab_size=pool.generator.servers[0].vocab_size,
            context_length=config.rollout.context_length,
            architecture=str(model.get("model_type")),
            limits=limits,
            records=records,
        )
        models.start()
        stack.push_async_callback(models.close)
        service = Service(
            store,
            models,
            sampler,
            renderer,
            name=args.name or args.model,
            model_path=config.model.path,
        )
        server = SharedServer(make_app(service, key), host=host, port=int(port), tls=tls)
        address = await stack.enter_async_context(server)
        say(f"model    {args.name or args.model}, {config.policy.backend}, {config.rollout.name}")
        say(f"client   export TINKER_BASE_URL={address}")
        say(f"key      export TINKER_API_KEY=$(cat {directory / 'key'})")
        await sampler.run(pool)


def _key(file: Path) -> str:
    """Returns the key: that of the environment, or the directory's, which is made if missing."""
    from treadle.trainer.launch.run_tls import write_private

    given = os.environ.get("TINKER_API_KEY")
    if given or not file.exists():
        file.unlink(missing_ok=True)
        write_private(file, (given or f"tml-{secrets.token_urlsafe(32)}").encode())
    return file.read_text(encoding="utf-8").strip()
