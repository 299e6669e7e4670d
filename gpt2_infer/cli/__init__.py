"""The command line: each command is a module with one typed function of the same name.

The command line, the tools of `mcp` and --json all come from that function. What it returns is a
value; text() of its module words it. The exit status tells whether its `passed` is false, or comes
from exit_status() of its module. Nothing here imports torch; a command imports it when it runs.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cyclopts
from cyclopts import Parameter

from gpt2_infer import __version__
from gpt2_infer.cli import console
from gpt2_infer.cli.options import DEFAULT_PROMPT, no_word_is_none

__all__ = ["DEFAULT_PROMPT", "Call", "main", "parse", "program"]

COMMANDS = (
    *("generate", "batch", "backends", "verify", "compare", "diverge", "perplexity", "export"),
    *("kernels", "mcp", "predict", "timeline", "accesses", "report", "worth"),
)
"""The default first."""
FLAGS = (
    "--json prints one JSON value to standard output, not text; "
    "--debug shows the traceback of an error."
)


def program() -> int:
    """Run the command line as a program: if a kernel that it names ends the process, say how.

    Only commands that run kernels in their own process name them with these words.
    """
    if not any(
        re.match(r"(diverge|timeline|worth)$|--(decode-)?backend", word) for word in sys.argv[1:]
    ):
        return main()
    from gpt2_infer.cli.watched import watched

    return watched(main)


@dataclass(frozen=True)
class Call:
    """A command and its arguments."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    json: bool

    def run(self) -> int:
        """Call the function, print what it returns, and return the exit status."""
        module = sys.modules[self.function.__module__]
        result = call(self.function, self.arguments, live=not self.json)
        if self.json:
            console.show(json.dumps(console.plain(result), indent=2))
        elif hasattr(module, "text"):
            console.show(module.text(result, **self.arguments))
        if hasattr(module, "exit_status"):
            return int(module.exit_status(result))
        return 0 if getattr(result, "passed", True) else console.EXIT_FAILED


def call(function: Callable[..., Any], arguments: dict[str, Any], **hidden: object) -> Any:
    """Call a command's function; hidden: values of its hidden parameters, if it has them."""
    signature = inspect.signature(function)
    known = {name: value for name, value in hidden.items() if name in signature.parameters}
    bound = inspect.BoundArguments(signature, OrderedDict(arguments | known))
    return function(*bound.args, **bound.kwargs)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status; docs/cli.md lists the statuses."""
    console.prepare_streams()
    words = sys.argv[1:] if argv is None else argv
    debug = "--debug" in words
    try:
        console.show(end="")  # fails now, not after the work, if standard output is closed
        parsed = parse(words)
        if isinstance(parsed, str):
            console.show(parsed)
            return 0
        return parsed.run()
    except KeyboardInterrupt:
        if debug:
            raise
        print("gpt2-infer: interrupted", file=sys.stderr)
        return console.EXIT_INTERRUPTED
    except BrokenPipeError:
        console.discard_output()
        return 0
    except Exception as error:
        if debug and not isinstance(error, cyclopts.CycloptsError):
            raise
        return _explain(error)


def _explain(error: Exception) -> int:
    """Print an error in one line, and return its exit status."""
    from attention_kernels.errors import KernelError, describe

    status = console.EXIT_BAD_INPUT
    if isinstance(error, cyclopts.CycloptsError):
        message = str(error)
        if len(message) > 200:  # it quotes a long word
            message = f"{message[:100]} ... {message[-100:]}"
    elif known := console.message_of(error):
        hint = "; --debug shows the traceback" if isinstance(error, KernelError) else ""
        message = known + hint
    else:
        status = console.EXIT_BUG
        message = f"this is a bug in gpt2-infer: {describe(error)}; --debug shows the traceback"
    console.print_error("gpt2-infer", message)
    return status


def parse(argv: Sequence[str]) -> Call | str:
    """Return the call, or the text that --help or --version asks for; raises CycloptsError."""
    words = [word for word in argv if word not in ("--json", "--debug")]
    first = words[0] if words else ""
    name, program = COMMANDS[0], "gpt2-infer"
    if first in COMMANDS:
        name, program = words.pop(0), f"gpt2-infer {first}"
    function = function_of(name)
    app = cyclopts.App(
        name=program,
        help=first_line(function),
        help_epilogue=FLAGS,
        help_format="plaintext",
        group_commands="Options",
        group_parameters="Options",
        help_flags="--help",
        version=f"gpt2-infer {__version__}",
        version_flags="--version",
        default_parameter=Parameter(negative=(), show_default=_default),
        config=no_word_is_none,
    )
    app.default(function)
    for other in COMMANDS if first not in COMMANDS else ():  # for the help
        app.command(cyclopts.App(name=other, help=first_line(function_of(other)), group="Commands"))
    called, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    if called is not app.default_command:  # help or version
        with contextlib.redirect_stdout(io.StringIO()) as output:
            called(*bound.args, **bound.kwargs)
        return output.getvalue().rstrip()
    bound.apply_defaults()
    return Call(function, dict(bound.arguments), json="--json" in argv)


def function_of(name: str) -> Callable[..., Any]:
    """Return a command's function, for parsers of its annotations and docstring."""
    function: Callable[..., Any] = getattr(importlib.import_module(f"{__name__}.{name}"), name)
    # The type that it returns may be imported for type checkers only.
    function.__annotations__.pop("return", None)
    # A help in several lines, which are indented by 12 spaces, is one line.
    function.__doc__ = re.sub(r"\n {12}", " ", function.__doc__ or "")
    return function


def first_line(function: Callable[..., Any]) -> str:
    """Return the first line of a docstring."""
    return (function.__doc__ or "").partition("\n")[0]


def _default(value: object) -> str | None:
    """Return a default for the help; None if the help shows none."""
    if value is None or value is False or value == ():
        return None
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
