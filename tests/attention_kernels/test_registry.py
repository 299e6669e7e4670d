from __future__ import annotations

import importlib
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from attention_kernels import BackendSpec, get_backend, ladder, list_backends, register, registry
from attention_kernels.contract import Kernels
from attention_kernels.errors import (
    KernelError,
    OutputError,
    UnavailableBackendError,
    UnknownBackendError,
    UnsupportedError,
)

EFFICIENT = "PYTORCH_SDPA_EFFICIENT_ATTENTION"
OURS = ["DECODE_SPLIT_KV_VERSION_1", "DECODE_SPLIT_KV_VERSION_3"]
PLAIN = ["NAIVE_PYTORCH", "NAIVE_PYTORCH"]
FIELDS = {"family": "test", "summary": "For tests.", "precisions": {"float32": "ieee-fp32"}}


@pytest.mark.parametrize(
    ("dtype", "head_dim", "gpu", "attends", "decodes"),
    [
        (torch.float32, 64, 0, "CUSTOM_CUDA", OURS),
        (torch.bfloat16, 64, 0, EFFICIENT, OURS),
        (torch.float32, 80, 0, EFFICIENT, PLAIN),
        (torch.float32, 64, 1, EFFICIENT, PLAIN),  # that GPU is too old
    ],
)
def test_the_defaults_on_cuda_are_ours_where_they_serve(
    dtype, head_dim, gpu, attends, decodes, monkeypatch
):
    monkeypatch.setattr(BackendSpec, "unavailable_reason", lambda _, d: "old" if d.index else None)
    monkeypatch.setattr(registry, "_serves", registry._serves.__wrapped__)
    arguments = torch.device("cuda", gpu), dtype, head_dim
    few, many = (registry.default_decode_backend(*arguments, n).name for n in (1023, 1024))
    assert [few, many] == decodes
    assert registry.default_backend(*arguments).name == attends


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("NAIVE%PYTORCH", "NAIVE_PYTORCH"),
        ("cudnn", "PYTORCH_SDPA_CUDNN_ATTENTION"),
        ("nothing like it", None),
        ("", None),
        (None, None),
        (Path("v01_x.cu"), None),
        pytest.param("CUSTOM_CUDA_" * 17_000, None, id="long"),  # to compare it would take seconds
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name, nearest):
    assert get_backend("naive-pytorch") is get_backend("NAIVE_PYTORCH")
    for find in get_backend, ladder.resolve:
        with pytest.raises(UnknownBackendError) as caught:
            find(name)
        assert str(caught.value).startswith(f"unknown attention backend {name!r}"[:1000])
        assert len(str(caught.value)) < 1200
        assert nearest is None or nearest in caught.value.nearest


@pytest.mark.parametrize(
    "change",
    [
        {"name": "lower"},
        {"name": "A-DASH"},
        {"precisions": {}},
        {"precisions": {"bfloat16": "tf32"}},  # whose budgets zeros would meet
        {"head_dims": (64, 0)},
        {"head_dims": (10**12,)},
        {"device_types": ("tpu",)},
        {"error_slack": 5},
        {"error_slack": 2, "precisions": {"float32": "tf32"}},
    ],
)
def test_invalid_fields_are_refused(change):
    with pytest.raises(ValueError, match=r" must be "):
        register(**{"name": "TEST_INVALID", **FIELDS, **change})(Kernels)


def raising(error):
    def function(*_):
        raise error

    return function


fail = raising(AssertionError("no"))


def test_a_backend_is_loaded_once_and_a_name_registered_once(clean_registry):
    loads = []
    load = register(name="TEST_BACKEND", **FIELDS)(lambda: loads.append(1) or Kernels(fail))
    assert not loads
    spec = get_backend("TEST_BACKEND")
    assert spec.load() is spec.load()
    assert loads == [1]
    with pytest.raises(ValueError, match="TEST_BACKEND is already registered"):
        register(name="TEST_BACKEND", **FIELDS)(load)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"loader": fail}, "its loader raised AssertionError: no (test_registry.py:"),
        ({"loader": lambda: sys.exit(3)}, "its loader raised SystemExit: 3 (test_registry.py:"),
        ({"loader": lambda: None}, "its loader returned NoneType instead of Kernels"),
        ({"loader": Kernels, "probe": fail}, "its probe raised AssertionError: no (test_registry"),
    ],
)
def test_a_backend_that_fails_to_load_is_unavailable(fields, words):
    with pytest.raises(UnavailableBackendError) as caught:
        BackendSpec(name="TEST_BROKEN", **fields, **FIELDS).load()
    assert words in str(caught.value)


Q = torch.randn(1, 1, 2, 8)


@pytest.mark.parametrize(
    ("kernel", "error", "words"),
    [
        (fail, KernelError, "raised AssertionError: no (test_registry.py:"),
        (lambda *_: sys.exit(), KernelError, "raised SystemExit: no message (test_"),
        (lambda *_: None, OutputError, "returned NoneType instead of (1, 1, 2, 8)"),
        (lambda q, *_: q.mT, OutputError, "returned (1, 1, 8, 2) torch.float32 on cpu instead of"),
        (lambda q, *_: q.to("meta"), OutputError, "returned (1, 1, 2, 8) torch.float32 on meta"),
        (lambda *_: Q.mT.contiguous().mT, OutputError, "returned strides (16, 16, 1, 2) instead"),
        (lambda q, k, *_: k, OutputError, "returned the memory of an input"),
        (raising(UnsupportedError("TEST", [])), UnsupportedError, "cannot take this call"),
        (None, UnsupportedError, "cannot take this call: it has "),  # no kernel
        (raising(torch.OutOfMemoryError()), torch.OutOfMemoryError, ""),
    ],
)
def test_a_kernels_fault_is_one_sentence_and_a_refusal_stays_one(kernel, error, words):
    spec = BackendSpec(name="TEST", loader=lambda: Kernels(kernel, kernel), **FIELDS)
    for call in spec.attention, spec.decode:
        others = [torch.ones(1, dtype=torch.int32)] * (call == spec.decode)
        with pytest.raises(error) as caught:
            call(Q, Q, Q, *others)
        assert not words or str(caught.value).startswith(f"attention backend TEST {words}")


@pytest.mark.parametrize("exactly", [False, True])
def test_a_device_without_the_instructions_is_refused(exactly, monkeypatch):
    """The current device, cuda:0, has them."""
    gpus = {0: (8, 0), 1: (7, 5), 2: (12, 0)}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: gpus[d.index or 0])
    version = types.SimpleNamespace(needs_exactly=exactly)
    fields = {"min_compute_capability": (8, 0), "version": version, "device_types": ("cuda",)}
    spec = BackendSpec(name="TEST_NEEDS", loader=Kernels, **fields, **FIELDS)
    needs = f"needs compute capability 8.0 {'and no other' if exactly else 'or higher'}"
    too_new = f"{needs}, and this device has 12.0" if exactly else None
    assert [*map(spec.unavailable_reason, ("cuda", "cuda:1", "cuda:2", "cpu"))] == [
        None,
        f"{needs}, and this device has 7.5",
        too_new,
        "runs on cuda only, not on cpu",
    ]


def test_a_refusal_gives_every_reason():
    q = torch.zeros(1, 4, 2, 80).double()
    with pytest.raises(UnsupportedError) as caught:
        get_backend("CUSTOM_CUDA_VERSION_1").attention(q, q, q)
    dtype = "dtype float64 (it takes float32)"
    assert caught.value.reasons == [dtype, "head_dim 80 (it takes 32, 64, 128)"]


PLUGGED_IN = """
time.sleep(0.2)
@register(name="PLUGGED_IN", family="plug-in", summary="From elsewhere.",
          precisions={"float32": "ieee-fp32"})
def load():
    return Kernels(lambda q, k, v, softmax_scale, is_causal: v.clone())
"""


@pytest.fixture
def forget(monkeypatch):
    """forget(): make the next use of the registry discover nothing but the installed plug-in."""
    modules = {*sys.modules}
    list_backends()

    def forget() -> None:
        monkeypatch.setattr(registry, "_specs", {})
        monkeypatch.setattr(registry, "_discovered", False)
        for name in {*sys.modules} - modules:
            del sys.modules[name]

    yield forget
    forget()


def test_a_broken_plugin_is_named_and_can_be_left_out(plugin, forget, monkeypatch):
    plugin("raise ImportError('no libfoo')")
    forget()
    (spec,) = list_backends()
    assert spec.name == "PLUGIN_STRANGE"
    reason = "its plug-in failed to load: ImportError: no libfoo (strange_plugin.py:"
    assert spec.unavailable_reason("cpu").startswith(reason)
    monkeypatch.setenv("ATTENTION_KERNELS_PLUGINS", "off")
    forget()
    assert list_backends() == []


def test_the_first_use_of_the_registry_by_many_threads_finds_every_backend(plugin, forget):
    plugin(PLUGGED_IN)
    forget()
    ready = threading.Barrier(8)

    def use(thread: int) -> str:
        ready.wait()
        return get_backend("plugged-in").name if thread % 2 else list_backends()[-1].name

    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(use, range(8))] == ["PLUGGED_IN"] * 8


def test_a_plugin_that_another_thread_imports_does_not_wait_for_discovery(plugin, forget):
    """Discovery holds its lock while it waits for that import, so waiting would be a deadlock."""
    plugin(PLUGGED_IN)
    forget()
    with registry._lock, ThreadPoolExecutor(1) as thread:
        thread.submit(importlib.import_module, "strange_plugin").result(timeout=30)
    assert [spec.name for spec in list_backends()] == ["PLUGGED_IN"]
