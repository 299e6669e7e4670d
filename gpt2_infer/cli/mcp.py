"""The command `gpt2-infer mcp`."""

from __future__ import annotations

from gpt2_infer.errors import RequestError


def mcp() -> None:
    """Serve the judge and the inspection tools to programs, over MCP on standard streams."""
    try:
        from gpt2_infer.cli.tools import serve
    except ModuleNotFoundError as error:
        raise RequestError("mcp needs the MCP SDK: install gpt2-infer[mcp]") from error
    serve()
