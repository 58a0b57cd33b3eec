"""Tools of Model Context Protocol servers, through the protocol's official SDK (extra `mcp`).

`servers` reads how to reach servers, `connection` keeps one connection per trajectory, `tool`
adapts their tools to ours, and `discovery` lists the tools at start.
"""

from treadle.tools.mcp.discovery import discover
from treadle.tools.mcp.servers import ServerConfig, read_servers
from treadle.tools.mcp.tool import McpTool

__all__ = ["McpTool", "ServerConfig", "discover", "read_servers"]
