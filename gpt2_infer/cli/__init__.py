"""The command line. Each command is a module with add_options() and run(), imported on use.

Nothing here imports torch; a command imports it when it runs.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from types import ModuleType

from gpt2_infer import __version__
from gpt2_infer.cli import console
from gpt2_infer.cli.options import DEFAULT_PROMPT, DTYPES, Parser, see_only

__all__ = ["DEFAULT_PROMPT", "DTYPES", "Parser", "main", "program"]

DEFAULT_COMMAND = "generate"
COMMANDS = {
    "generate": "generate text with GPT-2, using the attention backend of your choice",
    "batch": "complete files of prompts; a killed job resumes where it stopped",
    "backends": "list the attention backends and whether they run here",
    "verify": "check one backend against the float64 reference and show its worst case",
    "compare": "check and time backends: end-to-end generation, or the kernel alone",
    "diverge": "find where two backends or engines diverge, and tell a tie from a bug",
    "perplexity": "score backends by how well the model predicts a text",
    "export": "write a verified kernel as a package for pip or a repository for Hugging Face's Hub",
    "kernels": "show the registers, spills and occupancy of a ladder's versions, without a GPU",
    "mcp": "serve the judge and the inspection tools to programs, over MCP on standard streams",
    "cache": "list the cached compiled kernels, or delete them",
    "predict": "predict a kernel's time on a GPU, and what limits it, without that GPU",
    "accesses": "count bank conflicts and memory sectors of each source line, without a GPU",
    "report": "write an HTML report on kernels, line by line, and on results",
}


def program() -> int:
    """Run the command line as a program: if a kernel that it names ends the process, say how.

    Only commands that run kernels in their own process name them with these words.
    """
    if not any(re.match(r"diverge$|--(decode-)?backend", word) for word in sys.argv[1:]):
        return main()
    from gpt2_infer.cli.watched import watched

    return watched(main)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status; docs/cli.md lists the statuses."""
    console.prepare_streams()
    debug = False
    try:
        console.show(end="")  # fails now, not after the work, if standard output is closed
        command, arguments = parse(sys.argv[1:] if argv is None else argv)
        debug = arguments.debug
        if device := getattr(arguments, "device", None):
            arguments.device = see_only(device)
        status: int = command.run(arguments)
        console.show(end="")
        return status
    except KeyboardInterrupt:
        if debug:
            raise
        print("gpt2-infer: interrupted", file=sys.stderr)
        return console.EXIT_INTERRUPTED
    except BrokenPipeError:
        console.discard_output()
        return 0
    except Exception as error:
        if debug:
            raise
        from attention_kernels.errors import KernelError, describe

        if message := console.message_of(error):
            hint = "; --debug shows the traceback" if isinstance(error, KernelError) else ""
            console.print_error("gpt2-infer", message + hint)
            return console.EXIT_BAD_INPUT
        bug = f"this is a bug in gpt2-infer: {describe(error)}; --debug shows the traceback"
        console.print_error("gpt2-infer", bug)
        return console.EXIT_BUG


def parse(argv: Sequence[str]) -> tuple[ModuleType, argparse.Namespace]:
    """Return the command's module and its options; the default command is generate."""
    words = list(argv)
    first = next((word for word in words if word != "--debug"), None)
    if first in COMMANDS:
        words.remove(first)
        name, program, epilog = first, f"gpt2-infer {first}", None
    else:
        name, program, epilog = DEFAULT_COMMAND, "gpt2-infer", _list_commands()
    command = importlib.import_module(f"{__name__}.{name}")
    parser = Parser(
        prog=program,
        description=f"{COMMANDS[name][0].upper()}{COMMANDS[name][1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("--version", action="version", version=f"gpt2-infer {__version__}")
    command.add_options(parser)
    return command, parser.parse_args(words)


def _list_commands() -> str:
    rows = [f"  {name:<12}{what}" for name, what in COMMANDS.items() if name != DEFAULT_COMMAND]
    return "\n".join(["commands (gpt2-infer COMMAND --help):", *rows])
