"""The rollout server: token generation and weight updates over gRPC.

Start one with ``python -m treadle.rollout_server``, or inside a program:

    from treadle.rollout_server.server import serve

    async with serve(ServerConfig(engine="fake")) as server:
        ...

`treadle.rollout_server.engine` is what an engine implements, `treadle.conformance.contracts` what
it must pass.
"""

from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import Engine, EngineInfo, EngineRequest
from treadle.rollout_server.registry import ENGINES, EngineFactory

__all__ = ["ENGINES", "Engine", "EngineFactory", "EngineInfo", "EngineRequest", "ServerConfig"]
