"""gpt2-infer timeline."""

from __future__ import annotations

import json

from attention_kernels.inspection import timeline
from attention_kernels.inspection.timeline import Phase, Stamp, Timeline, Warp
from gpt2_infer.cli import main

WARPS = [Warp(0, 0, n, [Stamp("14", 0.0, 8.0 - n), Stamp("a<b", 20.0, 20.0)]) for n in range(2)]
PHASES = [
    Phase("14", None, "x();", 2, 9.0, 7.5, 0.833),
    Phase("14", "a<b", "", 2, None, 12.5, None),
]
TIMES = "H200", 100.0, 101.5, 0.015
FOUND = Timeline("v12", (1, 64, 12, 1), 64, "H200 SXM", PHASES, WARPS, WARPS[:1], *TIMES)


def test_text_json_and_page_agree(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(timeline, "timeline", lambda *_: FOUND)
    command, out = ["timeline", "CUSTOM_CUDA_VERSION_12"], tmp_path / "page.html"
    assert main([*command, "--out", str(out)]) == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {"wait at 14 2 9 8 0.83 x();", "14 to a<b 2 12"} < {*shown}
    assert shown[-1] == "stamps cost 1.5%: a call takes 101.5 us with them, 100.0 us without"
    page = out.read_text()
    assert (page.count("<svg"), page.count("<rect")) == (2, 6)
    assert "14 to a&lt;b: 12 cycles" in page
    assert main([*command, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["phases"][0]["predicted"] == 7.5
    assert value["measured"][0]["stamps"] == [["14", 0.0, 8.0], ["a<b", 20.0, 20.0]]
