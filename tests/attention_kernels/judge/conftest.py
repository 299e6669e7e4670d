from __future__ import annotations

import pytest

METADATA = "Metadata-Version: 2.1\nName: strange\nVersion: 1\n"
ENTRY_POINTS = "[attention_kernels.backends]\nstrange = strange_plugin\n"
IMPORTS = """
import atexit, ctypes, functools, gc, inspect, json, os, sys, threading, time
import torch
from attention_kernels import register
from attention_kernels.contract import Kernels
from attention_kernels.judge.reference import naive_attention as right
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """plugin(source): install it as a plug-in for the workers that this process starts."""

    def plugin(source):
        (tmp_path / "strange_plugin.py").write_text(IMPORTS + source)
        folder = tmp_path / "strange-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(METADATA)
        (folder / "entry_points.txt").write_text(ENTRY_POINTS)
        monkeypatch.syspath_prepend(str(tmp_path))  # a worker gets this process's path

    return plugin
