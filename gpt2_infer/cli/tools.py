"""The tools that `gpt2-infer mcp` serves: functions of commands, with schemas of their arguments.

Calls run one after the other, each in a thread, so that no call disturbs what another one times.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import sys
import threading
from collections.abc import Callable
from typing import Annotated, Any

import anyio
import cyclopts
import msgspec
from anyio import from_thread, to_thread
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp_types import (
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
)

from attention_kernels.child import ending
from gpt2_infer import __version__
from gpt2_infer.cli import call, function_of
from gpt2_infer.cli.console import EXIT_BAD_INPUT, EXIT_FAILED, message_of, plain

INSTRUCTIONS = (
    "Write an attention kernel as a version file, *.cu; verify it; look at its memory accesses, "
    "registers and predicted time; compare it with other backends. A wrong kernel is a result "
    "with passed false. An error means that there is no verdict, and says why."
)
NAMES = ("backends", "verify", "accesses", "predict", "kernels", "compare", "diverge")
FUNCTIONS = {name: function_of(name) for name in NAMES}
_turn = anyio.Lock()


class ToolError(Exception):
    """An expected error, in words."""


def serve() -> None:
    """Serve until the client closes standard input."""
    server: Server[dict[str, Any]] = Server(
        "gpt2-infer",
        instructions=INSTRUCTIONS,
        version=__version__,
        on_list_tools=_list,
        on_call_tool=_call,
    )

    async def run() -> None:
        async with stdio_server() as (read, write):
            await server.run(read, write, server.create_initialization_options())

    anyio.run(run)


def arguments_of(function: Callable[..., Any]) -> type[msgspec.Struct]:
    """Return a struct of the parameters that a program may give; others are refused by name."""
    app = cyclopts.App()
    app.default(function)
    # The options of its model are arguments, too; that of the name takes the place of all of them.
    takes_model = function.__name__ == "diverge"
    fields: dict[str, tuple[str, Any, Any]] = {}
    for argument in app.assemble_argument_collection(parse_docstring=True):
        given, parameter = argument.field_info, argument.parameter
        if parameter.parse is not False and (takes_model or not argument.keys):
            meaning = msgspec.Meta(description=parameter.help)
            default = msgspec.NODEFAULT if given.default is given.empty else given.default
            fields[given.name] = given.name, Annotated[given.annotation, meaning], default
    kept = [*fields.values()]
    return msgspec.defstruct(function.__name__, kept, kw_only=True, forbid_unknown_fields=True)


async def _list(_: ServerRequestContext, __: PaginatedRequestParams | None) -> ListToolsResult:
    tools = []
    for name, function in FUNCTIONS.items():
        (schema,), components = msgspec.json.schema_components(
            [arguments_of(function)], schema_hook=lambda _: {"type": "string"}
        )
        schema = components.pop(schema["$ref"].rpartition("/")[2])
        schema = {"type": "object", **schema, "$defs": components}
        text = inspect.cleandoc((function.__doc__ or "").partition("\n    Args:\n")[0])
        tools.append(Tool(name=name, description=text, input_schema=schema))
    return ListToolsResult(tools=tools)


async def _call(context: ServerRequestContext, asked: CallToolRequestParams) -> CallToolResult:
    def on_check(done: int, total: int) -> None:
        from_thread.check_cancelled()
        from_thread.run(context.session.report_progress, done, total)

    try:
        if (function := FUNCTIONS.get(asked.name)) is None:
            raise ToolError(f"no tool is named {asked.name}, only {', '.join(FUNCTIONS)}")
        given = checked(function, asked.arguments or {})
        if asked.name == "diverge":
            value = await _diverge(given)
        else:
            value = plain(await _run(lambda: call(function, given, on_check=on_check)))
    except ToolError as error:
        text = f"Error executing tool {asked.name}: {error}"
        return CallToolResult(content=[TextContent(type="text", text=text)], is_error=True)
    value = {"result": value} if isinstance(value, list) else value
    content = TextContent(type="text", text=json.dumps(value, indent=2))
    return CallToolResult(content=[content], structured_content=value)


def checked(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments, converted; raises ToolError for a wrong argument."""
    try:
        given = msgspec.convert(
            arguments, arguments_of(function), dec_hook=lambda kind, value: kind(value)
        )
    except msgspec.ValidationError as error:
        raise ToolError(str(error)) from error
    return msgspec.structs.asdict(given)


async def _diverge(given: dict[str, Any]) -> Any:
    """Run the command in a process of its own, because the model and the kernels share it."""
    names = [given.pop("a"), given.pop("b")]
    options = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in given.items()
        if value not in (None, False)
    ]
    command = [sys.executable, "-m", "gpt2_infer", "diverge", "--json", *options, "--", *names]
    async with _turn:
        done = await anyio.run_process(command, check=False)
    if done.returncode not in (0, EXIT_FAILED):
        error = done.stderr.decode().rpartition("error: ")[2].strip()
        raise ToolError(error if done.returncode == EXIT_BAD_INPUT else ending(done.returncode))
    return json.loads(done.stdout)


async def _run(work: Callable[[], Any]) -> Any:
    """Call in a thread when it is this call's turn; a cancelled call ends the kernels' processes.

    Raises ToolError for an expected error.
    """
    ended = threading.Event()

    def thread() -> Any:
        try:
            return work()
        finally:
            ended.set()

    async with _turn:
        try:
            return await to_thread.run_sync(thread, abandon_on_cancel=True)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                while not ended.is_set():  # a comparison starts further processes
                    for process in multiprocessing.active_children():
                        process.kill()
                    await anyio.sleep(0.05)
            raise
        except Exception as error:
            if message := message_of(error):
                raise ToolError(message) from error
            raise
