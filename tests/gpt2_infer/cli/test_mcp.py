"""The server, run as `gpt2-infer mcp` and called with the SDK's own client."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from attention_kernels.ladder import compilers
from tests.conftest import EXAMPLE, ROOT, SHORT_SUITE
from tests.gpt2_infer.cli.program import run
from tests.gpt2_infer.cli.test_verify import LAUNCH, NEGATIVE

RIGHT = EXAMPLE / "v01_warp_per_row.cu"
# All checks are the business of the judge's tests.
SERVER = f'{SHORT_SUITE}raise SystemExit(main(["mcp"]))'
# A kernel writes in the folder for temporary files of its process only.
HANG = """  chdir(getenv("TMPDIR"));
  FILE* file = fopen("pid", "w");
  fprintf(file, "%d\\n", getpid());
  fclose(file);
  for (;;) sleep(1);
"""


@pytest.fixture(scope="module")
def temporary(tmp_path_factory):
    """The folder in which the server has its temporary files."""
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def session(temporary):
    """session(use): await use(client) of one server."""
    from_thread = pytest.importorskip("anyio.from_thread")
    mcp = pytest.importorskip("mcp")
    if reason := compilers.missing_compiler("emulator"):
        pytest.skip(reason)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    server = mcp.StdioServerParameters(command=sys.executable, args=["-c", SERVER], env=environment)
    with (
        from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(mcp.Client(mcp.stdio_client(server))) as client,
    ):
        yield lambda use: portal.call(use, client)


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        ("verify", {"name": "x", "bogus": 1}, "unknown field `bogus`"),
        ("diverge", {"a": "A", "b": "B", "backend": "C"}, "unknown field `backend`"),
        ("predict", {"name": "x", "seqlens": [64, 0]}, r"Expected `int` >= 1 - at `\$.seqlens\[1"),
        ("predict", {"name": "x", "dtype": "int8"}, "Invalid enum value 'int8'"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(tool, arguments, words):
    pytest.importorskip("mcp")
    from gpt2_infer.cli import tools

    with pytest.raises(tools.ToolError, match=words):
        tools.checked(tools.FUNCTIONS[tool], arguments)


@pytest.mark.slow
def test_a_program_lists_verifies_and_finds_a_divergence(session):
    async def use(client):
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert {"backends", "verify", "accesses", "predict", "kernels", "compare"} < {*tools}
        assert all(tool.input_schema["additionalProperties"] is False for tool in tools.values())
        rows = (await client.call_tool("backends", {})).structured_content["result"]
        assert "CUSTOM_CUDA_VERSION_1" in {row["name"] for row in rows}

        refused = await client.call_tool("verify", {"name": "nothing"})
        assert refused.is_error
        assert "unknown attention backend 'nothing'" in refused.content[0].text

        told = []

        async def progress(done, total, _):
            told.append((done, total))

        right = {"name": str(RIGHT), "device": "cpu", "seed": 0}
        found = await client.call_tool("verify", right, progress_callback=progress)
        assert found.structured_content["passed"], found
        assert told == [(done, 12) for done in range(1, 13)]
        wrong = {"name": str(NEGATIVE / "v02_off_by_one_mask.cu"), "device": "cpu"}
        found = await client.call_tool("verify", wrong)
        assert not found.is_error
        assert not found.structured_content["passed"]

        texts = {"a": "NAIVE_PYTORCH", "b": "PYTORCH_SDPA_MATH", "model": "demo"}
        found = await client.call_tool("diverge", {**texts, "max_new_tokens": 2})
        assert found.structured_content["verdict"] == "equal", found

    session(use)


@pytest.mark.slow
def test_cancelling_ends_the_kernels_process(session, temporary, tmp_path):
    hanging, text = tmp_path / "v01_hangs.cu", RIGHT.read_text().replace(LAUNCH, LAUNCH + HANG)
    headers = "".join(f"#include <{x}>\n" for x in ("unistd.h", "cstdio", "cstdlib"))
    hanging.write_text(text.replace('#include "', headers + '#include "', 1))

    def pids():
        return [text for x in temporary.glob("*/pid") if (text := x.read_text()).endswith("\n")]

    async def use(client):
        import anyio

        async with anyio.create_task_group() as group:
            group.start_soon(client.call_tool, "verify", {"name": str(hanging), "device": "cpu"})
            with anyio.fail_after(120):
                while not (found := pids()):
                    await anyio.sleep(0.05)
            group.cancel_scope.cancel()
        process = Path("/proc", found[0].strip())
        with anyio.fail_after(60):
            while process.exists():
                await anyio.sleep(0.05)
        after = await client.call_tool("backends", {})  # it is the next call's turn
        assert not after.is_error

    session(use)


def test_without_the_extra_one_sentence_says_what_to_install(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "gpt2_infer.cli.tools", raising=False)
    monkeypatch.setitem(sys.modules, "mcp.server.lowlevel", None)
    message = "gpt2-infer: error: mcp needs the MCP SDK: install gpt2-infer[mcp]\n"
    assert run(capsys, "mcp") == (2, "", message)
