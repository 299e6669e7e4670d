"""The command `gpt2-infer mcp`."""

from __future__ import annotations

import argparse

from gpt2_infer.errors import RequestError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command: none."""


def run(arguments: argparse.Namespace) -> int:
    """Serve until the client closes standard input, and return the exit status."""
    try:
        from gpt2_infer.cli.tools import server
    except ModuleNotFoundError as error:
        raise RequestError("mcp needs the MCP SDK: install gpt2-infer[mcp]") from error
    server.run("stdio")
    return 0
