"""`python -m treadle.agent_loop.proxy`: the endpoint as a process, over running rollout servers.

Invariant: when it serves, it prints one line of JSON with its address to standard output. The exit
code is 0 after SIGTERM or SIGINT, 1 if it cannot serve (one line names the cause), and 2 for
invalid arguments. The key that opens sessions is the environment's TREADLE_PROXY_KEY, or a random
one that is printed.

The main task waits for a signal.
"""

import argparse
import asyncio
import json
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from treadle.agent_loop.aio import run_until
from treadle.agent_loop.errors import SetupError
from treadle.agent_loop.loops.limits import LoopLimits
from treadle.agent_loop.loops.loop import Services
from treadle.agent_loop.parsers import PARSER_NAMES, parser_named
from treadle.agent_loop.proxy.admin import SessionAdmin
from treadle.agent_loop.proxy.allowances import AgentConstraints
from treadle.agent_loop.proxy.app import make_app
from treadle.agent_loop.proxy.server import SharedServer, TlsFiles, check_exposure
from treadle.agent_loop.proxy.sessions import AgentSampling, EndpointSessions
from treadle.agent_loop.types import SamplingParams
from treadle.tracing.inert import inert, log_inertly

PROGRAM = "python -m treadle.agent_loop.proxy"
_MAX_BODY_BYTES = 64 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until a signal; returns the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        tls = _tls(arguments)
        token, roots = _replica_secrets(arguments)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    log_inertly("INFO")
    try:
        asyncio.run(_run(arguments, tls, token, roots))
    except (ModuleNotFoundError, SetupError, ValueError) as error:
        sys.stderr.write(inert(f"{PROGRAM}: {error}\n"))
        return 1
    return 0


def _tls(arguments: argparse.Namespace) -> TlsFiles | None:
    certificate, key = arguments.tls_certificate, arguments.tls_key
    if (certificate is None) != (key is None):
        raise ValueError("--tls-certificate and --tls-key go together: give both or neither")
    tls = None if certificate is None else TlsFiles(certificate=certificate, key=key)
    check_exposure(
        arguments.host,
        tls=tls,
        allow="pass --insecure-allow-plaintext-beyond-loopback",
        allowed=arguments.insecure_allow_plaintext_beyond_loopback,
    )
    return tls


def _replica_secrets(arguments: argparse.Namespace) -> tuple[str | None, bytes | None]:
    """Returns the token for the replicas, and the certificates that they are checked with."""
    token = roots = None
    if (path := arguments.replica_token_file) is not None:
        token = path.read_text().strip()
        if not token:
            raise ValueError(f"--replica-token-file {path} is empty: write the token to it")
    if (path := arguments.replica_certificates) is not None:
        if not arguments.replica_tls:
            raise ValueError("--replica-certificates is for --replica-tls: give both")
        roots = path.read_bytes()
    return token, roots


async def _run(
    arguments: argparse.Namespace, tls: TlsFiles | None, token: str | None, roots: bytes | None
) -> None:
    # Imported here so that --help needs neither gRPC nor transformers.
    from treadle.agent_loop.hf import HfRenderer
    from treadle.agent_loop.rpc import ChannelSecurity, Requirements, connect

    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    parser = None if arguments.parser is None else parser_named(arguments.parser)
    renderer = HfRenderer.from_directory(arguments.tokenizer, parser=parser)
    needs = Requirements(
        tokenizer_sha256=renderer.tokenizer_sha256,
        vocab_size=renderer.vocab_size,
        capabilities=Requirements().capabilities
        | arguments.agent_constraints.required_capabilities,
    )
    given = os.environ.get("TREADLE_PROXY_KEY")
    key = given or secrets.token_urlsafe(24)
    security = ChannelSecurity(tls=arguments.replica_tls, root_certificates=roots, token=token)
    async with connect(arguments.replicas, requirements=needs, security=security) as generator:
        services = Services(
            generator=generator,
            renderer=renderer,
            limits=LoopLimits(
                max_response_tokens=arguments.max_response_tokens,
                max_context_tokens=arguments.max_context_tokens or generator.context_length,
                max_assistant_turns=arguments.max_assistant_turns,
            ),
            sampling=SamplingParams(
                max_tokens=arguments.max_tokens or arguments.max_response_tokens,
                temperature=arguments.temperature,
                top_p=arguments.top_p,
            ),
        )
        sessions = EndpointSessions(max_in_flight=arguments.max_requests)
        admin = SessionAdmin(
            sessions,
            services,
            key=key,
            sampling=arguments.agent_sampling,
            constraints=arguments.agent_constraints,
            deadline_s=arguments.deadline_s,
            max_sessions=arguments.max_sessions,
            max_session_requests=arguments.max_session_requests,
        )
        app = make_app(
            sessions, model=arguments.model, max_body_bytes=_MAX_BODY_BYTES, more=admin.routes
        )
        server = SharedServer(app, host=arguments.host, port=arguments.port, tls=tls)
        async with server as address:
            said = {"address": address} | ({} if given else {"key": key})
            sys.stdout.write(json.dumps(said) + "\n")
            sys.stdout.flush()
            await run_until(ending.wait(), admin.deadlines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Captures what agents sample through OpenAI's chat completions.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--replicas", nargs="+", required=True, metavar="HOST:PORT", help="rollout servers")
    add("--tokenizer", required=True, metavar="DIRECTORY", help="of the model")
    add("--parser", choices=PARSER_NAMES, help="of calls and reasoning; default: the template's")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8100, help="0 picks a free port")
    add("--tls-certificate", type=Path, metavar="FILE", help="PEM chain, to serve HTTPS")
    add("--tls-key", type=Path, metavar="FILE", help="PEM private key")
    add(
        "--insecure-allow-plaintext-beyond-loopback",
        action="store_true",
        help="listen beyond loopback without TLS; anyone on the way can read the keys",
    )
    add("--replica-tls", action="store_true", help="the rollout servers speak TLS")
    add(
        "--replica-certificates",
        type=Path,
        metavar="FILE",
        help="PEM certificates that the rollout servers' are checked with; default: the system's",
    )
    add("--replica-token-file", type=Path, metavar="FILE", help="token of the rollout servers")
    add("--model", default="policy", help="model name that agents see")
    add("--max-response-tokens", type=int, default=8192, help="of a sample, after its prompt")
    add(
        "--max-context-tokens", type=int, help="of a sample, with its prompt; default: the servers'"
    )
    add("--max-assistant-turns", type=int, help="completions of a session")
    add("--max-tokens", type=int, help="of a completion")
    add("--temperature", type=float, default=1.0, help="of all completions")
    add("--top-p", type=float, help="of all completions")
    add(
        "--agent-sampling",
        type=AgentSampling,
        choices=list(AgentSampling),
        default=AgentSampling.REFUSE,
        help="what to do with the temperature and top_p that agents ask for",
    )
    add(
        "--agent-constraints",
        type=AgentConstraints,
        choices=list(AgentConstraints),
        default=AgentConstraints.REFUSE,
        help="what to do where agents ask to constrain the sampling",
    )
    add("--deadline-s", type=float, default=3600.0, help="of a session, which is then discarded")
    add("--max-sessions", type=int, default=1024, help="open at a time")
    add("--max-session-requests", type=int, default=16, help="of one session at a time")
    add("--max-requests", type=int, default=1024, help="of all sessions at a time")
    return parser


if __name__ == "__main__":
    sys.exit(main())
