"""A kernel that hangs or ends its process leaves a verdict, and one of a plug-in is found."""

from __future__ import annotations

import importlib
import sys

import pytest

from attention_kernels import ArgumentError, register
from attention_kernels.contract import Kernels
from attention_kernels.isolation import verify_in_child
from attention_kernels.reference import naive_attention

PLUGIN = """
import os, sys, time
from attention_kernels import register
from attention_kernels.contract import Kernels
from attention_kernels.reference import naive_attention

@register(
    name="STRANGE", family="plug-in", summary="A plug-in of a test.",
    precisions={"float32": "ieee-fp32"}, head_dims=(32,), device_types=("cpu",),
)
def load():
    def attention(q, k, v, scale, causal):
        if q.shape[1] == 2:
            WHAT
        return naive_attention(q, k, v, scale, causal)
    return Kernels(attention)
"""
METADATA = "Metadata-Version: 2.1\nName: strange\nVersion: 1\n"
ENTRY_POINTS = "[attention_kernels.backends]\nstrange = strange_plugin\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "reported"),
    [
        ("time.sleep(1e6)", "it did not end within 2 s"),
        ("os._exit(0)", "it ended with exit status 0"),
    ],
)
def test_a_plug_in_that_does_not_return(does, reported, tmp_path, monkeypatch, clean_registry):
    (tmp_path / "strange_plugin.py").write_text(PLUGIN.replace("WHAT", does))
    folder = tmp_path / "strange-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(METADATA)
    (folder / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))  # the child gets this process's path
    monkeypatch.delitem(sys.modules, "strange_plugin", raising=False)
    importlib.import_module("strange_plugin")
    report = verify_in_child("strange", "cpu", timeout_s=2, max_failures=1)
    (failure,) = report.failures
    assert failure.what.startswith("seqlen 2, head_dim 32")
    assert failure.why == reported
    assert not report.passed


@pytest.mark.slow
def test_a_backend_of_this_process_alone_is_verified_in_it(clean_registry):
    def wrong(q, k, v, softmax_scale, is_causal):
        return naive_attention(q, k, v, softmax_scale, is_causal) + 1

    register(name="MINE", family="test", summary="Wrong.", precisions={"float32": "ieee-fp32"})(
        lambda: Kernels(wrong)
    )
    report = verify_in_child("MINE", "cpu", max_failures=1)
    assert report.failures[0].why.startswith("error ")


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_time_limit_is_a_number_of_seconds(seconds):
    with pytest.raises(ArgumentError, match="the time limit must be a positive number of seconds"):
        verify_in_child("NAIVE_PYTORCH", "cpu", timeout_s=seconds)
