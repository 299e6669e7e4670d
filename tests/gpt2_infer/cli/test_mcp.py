"""The server, run as `gpt2-infer mcp` and called with the SDK's own client."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from attention_kernels.ladder import compilers
from tests.conftest import SHORT_SUITE
from tests.gpt2_infer.cli.program import ROOT, run

WRONG = ROOT / "tests" / "attention_kernels" / "negative" / "v02_off_by_one_mask.cu"
RIGHT = ROOT / "examples" / "my_backend" / "src" / "my_backend" / "v01_warp_per_row.cu"
TOOLS = ["backends", "verify", "accesses", "predict", "kernels", "compare", "diverge"]
# All checks are the business of the judge's tests.
SERVER = f'{SHORT_SUITE}raise SystemExit(main(["mcp"]))'
LAUNCH = "cudaError_t launch(const Params& params, cudaStream_t stream) {\n"
HANG = """  FILE* file = fopen("PLACE", "w");
  fprintf(file, "%d\\n", getpid());
  fclose(file);
  for (;;) sleep(1);
"""


@pytest.fixture(scope="module")
def session():
    """session(use): await use(client) of one server."""
    from_thread = pytest.importorskip("anyio.from_thread")
    mcp = pytest.importorskip("mcp")
    if reason := compilers.missing_compiler("emulator"):
        pytest.skip(reason)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = mcp.StdioServerParameters(command=sys.executable, args=["-c", SERVER], env=environment)
    with (
        from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(mcp.Client(mcp.stdio_client(server))) as client,
    ):
        yield lambda use: portal.call(use, client)


def test_an_unknown_argument_is_refused_by_name():
    pytest.importorskip("mcp")
    from gpt2_infer.cli import tools

    required = {"diverge": {"a": "A", "b": "B"}, "backends": {}, "kernels": {}, "compare": {}}
    for name, function in tools.FUNCTIONS.items():
        with pytest.raises(tools.ToolError, match="unknown field `bogus`"):
            tools.checked(function, required.get(name, {"name": "x"}) | {"bogus": 1})
    for wrong, words in (
        ({"seqlens": [64, 0]}, r"Expected `int` >= 1 - at `\$.seqlens\[1\]`"),
        ({"launch": {"kernel": "k", "grid": [1, 2], "block": [1, 1, 1]}}, "length 3"),
        ({"dtype": "int8"}, "Invalid enum value 'int8'"),
    ):
        with pytest.raises(tools.ToolError, match=words):
            tools.checked(tools.FUNCTIONS["predict"], {"name": "x", **wrong})


@pytest.mark.slow
def test_a_program_lists_verifies_and_predicts(session):
    async def use(client):
        tools = (await client.list_tools()).tools
        assert [tool.name for tool in tools] == TOOLS
        assert all(tool.description for tool in tools)
        assert all(tool.input_schema["additionalProperties"] is False for tool in tools)
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
        verdict = found.structured_content
        assert verdict["passed"], verdict
        assert verdict["backends"][0]["checks"] == 12
        assert verdict["backends"][0]["worst"]["status"] == "passed"
        assert told == [(done, 12) for done in range(1, 13)]

        found = await client.call_tool("verify", {"name": str(WRONG), "device": "cpu"})
        assert not found.is_error
        assert not found.structured_content["passed"]
        failures = found.structured_content["backends"][0]["failures"]
        assert any("change earlier rows" in failure["why"] for failure in failures)

        if compilers.find_nvcc():
            shape = {"name": str(RIGHT), "seqlens": [64], "heads": 1}
            found = await client.call_tool("predict", shape)
            (prediction,) = found.structured_content["result"]
            assert prediction["time_us"] > 0
            assert prediction["bound"]

    session(use)


@pytest.mark.slow
def test_cancelling_ends_the_kernels_process(session, tmp_path):
    place, hanging = tmp_path / "pid", tmp_path / "v01_hangs.cu"
    text = RIGHT.read_text().replace(LAUNCH, LAUNCH + HANG.replace("PLACE", str(place)))
    hanging.write_text(
        text.replace('#include "', '#include <unistd.h>\n#include <cstdio>\n#include "', 1)
    )

    async def use(client):
        import anyio

        async with anyio.create_task_group() as group:
            group.start_soon(client.call_tool, "verify", {"name": str(hanging), "device": "cpu"})
            with anyio.fail_after(120):
                while not (place.exists() and place.read_text().endswith("\n")):
                    await anyio.sleep(0.05)
            group.cancel_scope.cancel()
        process = Path("/proc") / place.read_text().strip()
        with anyio.fail_after(60):
            while process.exists():
                await anyio.sleep(0.05)
        found = await client.call_tool("backends", {})  # it is the next call's turn
        assert not found.is_error

    session(use)


@pytest.mark.slow
def test_diverge_runs_in_a_process_of_its_own(session):
    async def use(client):
        texts = {
            "a": "NAIVE_PYTORCH",
            "b": "PYTORCH_SDPA_MATH",
            "max_new_tokens": 2,
            "model": "demo",
        }
        found = await client.call_tool("diverge", texts)
        assert found.structured_content["verdict"] == "equal", found
        assert found.structured_content["new_tokens"] == 2
        refused = await client.call_tool("diverge", {**texts, "a": "-nothing"})
        assert refused.is_error
        assert "unknown attention backend '-nothing'" in refused.content[0].text

    session(use)


def test_without_the_extra_one_sentence_says_what_to_install(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "gpt2_infer.cli.tools", raising=False)
    monkeypatch.setitem(sys.modules, "mcp.server.lowlevel", None)
    message = "gpt2-infer: error: mcp needs the MCP SDK: install gpt2-infer[mcp]\n"
    assert run(capsys, "mcp") == (2, "", message)
