"""Tools of Model Context Protocol servers, by the protocol's official SDK (extra `mcp`).

`servers` says how servers are reached, `connection` keeps one for each trajectory, `tool` makes
them tools of ours, and `discovery` asks at start what there is.
"""

from treadle.tools.mcp.discovery import discover
from treadle.tools.mcp.servers import ServerConfig, read_servers
from treadle.tools.mcp.tool import McpTool

__all__ = ["McpTool", "ServerConfig", "discover", "read_servers"]
