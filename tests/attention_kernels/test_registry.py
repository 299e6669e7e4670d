from __future__ import annotations

import difflib
import importlib
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import attention_kernels
from attention_kernels import (
    BackendSpec,
    KernelError,
    OutputError,
    UnavailableBackendError,
    UnknownBackendError,
    UnsupportedError,
    get_backend,
    ladder,
    list_backends,
    register,
    registry,
)
from attention_kernels.contract import Kernels

NAMES = [spec.name for spec in list_backends()]
FIELDS = {
    "family": "test",
    "summary": "A backend of a test.",
    "precisions": {"float32": "ieee-fp32"},
}


def test_the_case_studys_names_exist():
    assert {
        "NAIVE_PYTORCH",
        "PYTORCH_SDPA_MATH",
        "PYTORCH_SDPA_FLASH_ATTENTION",
        "PYTORCH_SDPA_EFFICIENT_ATTENTION",
        "PYTORCH_SDPA_CUDNN_ATTENTION",
    } <= {*NAMES}


def test_public_names_are_sorted_and_exist():
    public = attention_kernels.__all__
    assert public == sorted(public)
    assert all(hasattr(attention_kernels, name) for name in public)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "reason", "attends", "decodes"),
    [
        ("float32", 64, None, True, True),
        ("float32", 64, "needs nvcc", False, False),
        ("float32", 80, None, False, False),
        ("float64", 64, None, False, False),
        ("bfloat16", 64, None, False, True),
    ],
)
def test_the_defaults_on_cuda_are_ours_where_they_serve(
    dtype, head_dim, reason, attends, decodes, monkeypatch
):
    monkeypatch.setattr(registry, "_serving", {})
    monkeypatch.setattr(BackendSpec, "unavailable_reason", lambda *_: reason)
    device, dtype, many = torch.device("cuda", 0), getattr(torch, dtype), registry.MANY_HEADS
    name = "CUSTOM_CUDA" if attends else "PYTORCH_SDPA_EFFICIENT_ATTENTION"
    assert registry.default_backend(device, dtype, head_dim).name == name
    for heads, version in ((1, 1), (many - 1, 1), (many, 3)):
        name = f"DECODE_SPLIT_KV_VERSION_{version}" if decodes else "NAIVE_PYTORCH"
        assert registry.default_decode_backend(device, dtype, head_dim, heads).name == name
    on_cpu = registry.default_decode_backend(torch.device("cpu"), dtype, head_dim)
    assert on_cpu.name == "PYTORCH_SDPA_FLASH_ATTENTION"


@settings(deadline=None)
@given(name=st.sampled_from(NAMES), data=st.data())
def test_any_case_and_any_dash_finds_the_backend(name, data):
    spelled = "".join(
        data.draw(st.sampled_from([c, c.lower(), "-" if c == "_" else c])) for c in name
    )
    assert get_backend(spelled).name == name


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_other_text_is_refused_with_the_nearest_names(text):
    if text.strip().upper().replace("-", "_") in NAMES:
        return
    with pytest.raises(UnknownBackendError) as caught:
        get_backend(text)
    error = caught.value
    assert set(error.nearest) <= set(NAMES)
    hint = f": did you mean {' or '.join(error.nearest)}?" if error.nearest else ""
    assert str(error) == f"unknown attention backend {text!r}{hint}"
    assert len(str(error)) < 200 + len(repr(text))


@pytest.mark.parametrize("name", [None, 3, b"x", Path("v01_x.cu"), "CUSTOM_CUDA_" * 17_000])
def test_what_is_no_name_is_an_unknown_backend(name, monkeypatch):
    compare = difflib.get_close_matches

    def of_short_ones(word, *rest, **how):
        assert len(word) < 200  # a longer one takes seconds
        return compare(word, *rest, **how)

    monkeypatch.setattr(difflib, "get_close_matches", of_short_ones)
    for find in get_backend, ladder.resolve:
        with pytest.raises(UnknownBackendError) as caught:
            find(name)
        assert str(caught.value).startswith(f"unknown attention backend {name!r}"[:1000])
        assert len(str(caught.value)) < 1200


@settings(deadline=None)
@given(name=st.sampled_from(NAMES), data=st.data())
def test_one_wrong_letter_names_the_right_backend(name, data):
    # Leave a version's number alone: several names would be equally similar.
    at = data.draw(st.integers(0, len(name.rstrip("0123456789")) - 1))
    with pytest.raises(UnknownBackendError) as caught:
        get_backend(name[:at] + "%" + name[at + 1 :])
    assert name in caught.value.nearest


@pytest.mark.parametrize("name", ["", "lower", "A-DASH", "A NAME", "1ST", "_A", "\u00c4", "A\n"])
def test_only_upper_case_identifiers_are_names(name):
    with pytest.raises(ValueError, match="a backend's name must be upper case"):
        register(name=name, **FIELDS)(lambda: Kernels(None))


def test_registering_and_loading(clean_registry):
    loads = []

    @register(name="TEST_BACKEND", **FIELDS)
    def load() -> Kernels:
        loads.append(1)
        return Kernels(raise_assertion)

    assert not loads
    spec = get_backend("test-backend")
    spec.load()
    spec.load()
    assert loads == [1]
    with pytest.raises(ValueError, match="TEST_BACKEND is already registered"):
        register(name="TEST_BACKEND", **FIELDS)(load)


@pytest.mark.parametrize(
    "change",
    [
        {"precisions": {"float32": "exact"}},
        {"precisions": {}},
        {"precisions": {"bfloat16": "tf32"}},  # whose budgets zeros would meet
        {"precisions": {"float32": "fp64"}},
        {"precisions": {"float8": "fp16"}},
        {"head_dims": (64, 0)},
        {"summary": "no full stop"},
        {"summary": "Two\nlines."},
        {"device_types": ("tpu",)},
        {"error_slack": 5},
    ],
)
def test_invalid_fields_are_refused(change):
    with pytest.raises(ValueError, match=r"TEST_INVALID: .* must be "):
        register(name="TEST_INVALID", **(FIELDS | change))(lambda: Kernels(None))


def raise_assertion(*_: object) -> Tensor:
    raise AssertionError("no")


def test_a_loader_that_fails_is_an_unavailable_backend(clean_registry):
    def load() -> Kernels:
        raise OSError("no such library")

    for name, loader, words in (
        ("TEST_BROKEN", load, "its loader raised OSError: no such library (test_registry.py:"),
        ("TEST_EXIT", lambda: sys.exit(3), "its loader raised SystemExit: 3 (test_registry.py:"),
        ("TEST_NONE", lambda: None, "its loader returned NoneType instead of Kernels"),
    ):
        register(name=name, **FIELDS)(loader)
        with pytest.raises(UnavailableBackendError) as caught:
            get_backend(name).load()
        assert words in str(caught.value)


def test_a_failed_probe_makes_the_backend_unavailable(clean_registry):
    register(name="TEST_PROBE", probe=raise_assertion, **FIELDS)(Kernels)
    reason = get_backend("TEST_PROBE").unavailable_reason("cpu")
    assert reason.startswith("its probe raised AssertionError: no (test_registry.py:")


Q = torch.randn(1, 1, 2, 8)
CALLS = {
    "attention": lambda spec: spec.attention(Q, Q, Q),
    "decode": lambda spec: spec.decode(Q, Q, Q, torch.ones(1, dtype=torch.int32)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("kernel", "error", "words"),
    [
        (raise_assertion, KernelError, "raised AssertionError: no (test_registry.py:"),
        (lambda *_: {}["tile"], KernelError, "raised KeyError: 'tile' (test_registry.py:"),
        (lambda *_: Q @ Q, KernelError, "raised RuntimeError: Expected size"),
        (lambda *_: sys.exit(), KernelError, "raised SystemExit: no message (test_"),
        (lambda *_: None, OutputError, "returned NoneType instead of (1, 1, 2, 8)"),
        (lambda q, *_: q.mT, OutputError, "returned (1, 1, 8, 2) torch.float32 on cpu instead of"),
        (lambda q, *_: q.double(), OutputError, "returned (1, 1, 2, 8) torch.float64"),
        (lambda q, *_: q.to("meta"), OutputError, "returned (1, 1, 2, 8) torch.float32 on meta"),
        (lambda *_: Q.mT.contiguous().mT, OutputError, "returned strides (16, 16, 1, 2) instead"),
        (lambda q, k, *_: k, OutputError, "returned the memory of an input"),
    ],
)
def test_a_kernels_fault_is_one_sentence(call, kernel, error, words):
    kernels = Kernels(kernel, kernel)
    spec = BackendSpec(name="TEST_WRONG", loader=lambda: kernels, **FIELDS)
    with pytest.raises(error) as caught:
        CALLS[call](spec)
    assert str(caught.value).startswith(f"attention backend TEST_WRONG {words}")
    assert error is OutputError or caught.value.__cause__ is not None


@pytest.mark.parametrize("raised", [KeyboardInterrupt, torch.OutOfMemoryError, UnsupportedError])
def test_other_exceptions_come_through(raised):
    def kernel(*_: object) -> Tensor:
        raise raised("TEST", []) if raised is UnsupportedError else raised

    spec = BackendSpec(name="TEST_RAISES", loader=lambda: Kernels(kernel), **FIELDS)
    with pytest.raises(raised):
        CALLS["attention"](spec)


def test_a_backend_that_only_decodes_says_so():
    decode = get_backend("NAIVE_PYTORCH").load().decode
    spec = BackendSpec(name="TEST_DECODES", loader=lambda: Kernels(decode=decode), **FIELDS)
    assert (spec.has_attention(), spec.has_decode("cpu")) == (False, True)
    assert CALLS["decode"](spec).shape == Q.shape
    assert spec.refusals(Q, Q, Q) == ["it has a decode kernel only"]
    with pytest.raises(UnsupportedError, match="it has a decode kernel only"):
        CALLS["attention"](spec)


def test_each_gpu_has_the_decoder_that_serves_it(monkeypatch):
    monkeypatch.setattr(registry, "_serving", {})
    monkeypatch.setattr(BackendSpec, "unavailable_reason", lambda _, d: "old" if d.index else None)
    names = [
        registry.default_decode_backend(torch.device("cuda", i), torch.float32, 64).name
        for i in (1, 0, 1)
    ]
    assert names == ["NAIVE_PYTORCH", "DECODE_SPLIT_KV_VERSION_1", "NAIVE_PYTORCH"]


def test_needs_contiguous_makes_inputs_contiguous(clean_registry):
    seen = []

    def kernel(q, k, v, softmax_scale, is_causal):
        seen.extend([q, k, v])
        return torch.empty(q.shape)

    for needs in (True, False):
        name = f"TEST_CONTIGUOUS_{needs}".upper()
        register(name=name, needs_contiguous=needs, **FIELDS)(lambda: Kernels(kernel))
        get_backend(name).attention(*torch.randn(1, 4, 3, 2, 8).unbind(2))
        assert all(x.is_contiguous() == needs for x in seen)
        seen.clear()


def test_an_unsupported_device_type_is_refused():
    spec = BackendSpec(name="TEST_CPU", loader=Kernels, device_types=("cpu",), **FIELDS)
    assert spec.unavailable_reason("cpu") is None
    assert "runs on cpu only" in spec.unavailable_reason("cuda")


@pytest.mark.parametrize(
    ("needs", "exactly", "capability", "words"),
    [
        ((8, 0), False, (7, 5), "8.0 or higher"),
        ((8, 0), False, (8, 0), None),
        ((8, 0), False, (12, 0), None),
        ((9, 0), True, (8, 0), "9.0 and no other"),
        ((9, 0), True, (9, 0), None),
        ((9, 0), True, (10, 0), "9.0 and no other"),
    ],
)
def test_a_device_without_the_instructions_is_refused(
    needs, exactly, capability, words, monkeypatch
):
    """On cuda:1; the current device, cuda:0, has them."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda d: capability if d.index else (9, 0)
    )
    fields = {
        "min_compute_capability": needs,
        "version": types.SimpleNamespace(needs_exactly=exactly),
    }
    spec = BackendSpec(name="TEST_NEEDS", loader=Kernels, **fields, **FIELDS)
    found = f"{capability[0]}.{capability[1]}"
    reason = words and f"needs compute capability {words}, and this device has {found}"
    assert spec.unavailable_reason("cuda:1") == reason
    assert spec.unavailable_reason("cuda") is None


def install_plugin(folder: Path, package: str, code: str) -> None:
    (folder / f"{package}.py").write_text(code)
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[attention_kernels.backends]\n{package} = {package}\n")


GOOD_PLUGIN = """
from attention_kernels import register
from attention_kernels.contract import Kernels
@register(name="PLUGGED_IN", family="plug-in", summary="From elsewhere.",
          precisions={"float32": "ieee-fp32"})
def load():
    return Kernels(lambda q, k, v, softmax_scale, is_causal: v.clone())
"""
BAD_PLUGINS = {
    "raises": ("raise ImportError('no libfoo')", "failed to load: ImportError: no libfoo (raises"),
    "exits": ("import sys; sys.exit(0)", "failed to load: SystemExit: 0 (exits.py:1)"),
    "two_lines": ("raise OSError('no GPU in\\nthis rack')", "failed to load: OSError: no GPU in ("),
}


@pytest.fixture
def forget(tmp_path, monkeypatch):
    """forget(): make the next use of the registry discover the plug-ins in tmp_path alone."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = {*sys.modules}

    def forget() -> None:
        monkeypatch.setattr(registry, "_specs", {})
        monkeypatch.setattr(registry, "_discovered", False)
        for name in {*sys.modules} - modules:
            del sys.modules[name]

    yield forget
    forget()


@pytest.fixture
def discover(forget):
    """discover(): {name: reason} of the plug-ins in tmp_path, as a new process would find them."""

    def discover() -> dict[str, str | None]:
        forget()
        return {spec.name: spec.unavailable_reason("cpu") for spec in list_backends()}

    return discover


def test_plugins_register_and_a_broken_one_is_named_and_breaks_nothing(
    tmp_path, discover, monkeypatch
):
    install_plugin(tmp_path, "good_plugin", GOOD_PLUGIN)
    for name, (code, _) in BAD_PLUGINS.items():
        install_plugin(tmp_path, name, code)
    reasons = discover()
    assert reasons.pop("PLUGGED_IN") is None
    assert reasons.keys() == {f"PLUGIN_{name.upper()}" for name in BAD_PLUGINS}
    for name, (_, words) in BAD_PLUGINS.items():
        assert words in reasons[f"PLUGIN_{name.upper()}"]
    monkeypatch.setenv("ATTENTION_KERNELS_PLUGINS", "off")
    assert discover() == {}


def test_ctrl_c_while_a_plugin_loads_raises_keyboard_interrupt(tmp_path, discover):
    install_plugin(tmp_path, "interrupted", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        discover()


def test_the_first_use_of_the_registry_by_many_threads_finds_every_backend(tmp_path, forget):
    install_plugin(tmp_path, "good_plugin", "import time; time.sleep(0.2)\n" + GOOD_PLUGIN)
    list_backends()
    forget()
    ready = threading.Barrier(8)

    def use(thread: int) -> str:
        ready.wait()
        return get_backend("plugged-in").name if thread % 2 else list_backends()[-1].name

    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(use, range(8))] == ["PLUGGED_IN"] * 8


def test_a_plugin_that_another_thread_imports_does_not_wait_for_discovery(tmp_path, forget):
    """Discovery holds its lock while it waits for that import, so waiting would be a deadlock."""
    install_plugin(tmp_path, "good_plugin", GOOD_PLUGIN)
    forget()
    with registry._lock, ThreadPoolExecutor(1) as thread:
        thread.submit(importlib.import_module, "good_plugin").result(timeout=30)
    assert [spec.name for spec in list_backends()] == ["PLUGGED_IN"]


def test_a_slow_plugin_is_named(tmp_path, discover, monkeypatch, capsys):
    install_plugin(tmp_path, "slow", GOOD_PLUGIN)
    discover()
    assert not capsys.readouterr().err
    monkeypatch.setattr(registry, "SLOW_PLUGIN_S", 0.0)
    discover()
    assert capsys.readouterr().err.startswith("the attention plug-in slow took 0 s to load (ATTEN")


def test_an_incomplete_registry_is_never_used(monkeypatch):
    """If one of our modules cannot be imported, every call fails, not only the first."""

    def fail(name):
        raise ImportError(name)

    monkeypatch.setattr(registry, "_discovered", False)
    monkeypatch.setattr(registry, "_specs", {})
    monkeypatch.setattr(registry.importlib, "import_module", fail)
    for _ in range(2):
        with pytest.raises(ImportError):
            list_backends()
