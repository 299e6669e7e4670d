from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attention_kernels
from attention_kernels import (
    OutputError,
    UnknownBackendError,
    UnsupportedError,
    get_backend,
    list_backends,
    register,
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


@given(name=st.sampled_from(NAMES), data=st.data())
def test_any_case_and_any_dash_finds_the_backend(name, data):
    spelled = "".join(
        data.draw(st.sampled_from([c, c.lower(), "-" if c == "_" else c])) for c in name
    )
    assert get_backend(spelled).name == name


@given(st.text(max_size=60))
def test_any_other_text_is_refused_with_a_hint_or_the_way_to_the_list(text):
    if text.strip().upper().replace("-", "_") in NAMES:
        return
    with pytest.raises(UnknownBackendError) as caught:
        get_backend(text)
    error = caught.value
    assert error.valid == NAMES
    assert set(error.nearest) <= set(NAMES)
    hint = f"did you mean {' or '.join(error.nearest)}?"
    assert str(error).endswith(hint if error.nearest else "see `gpt2-infer backends`")
    assert len(str(error)) < 200 + len(repr(text))


@given(name=st.sampled_from(NAMES), data=st.data())
def test_one_wrong_letter_names_the_right_backend(name, data):
    # In a version's number any digit may be the wrong one: there, no name is nearer than others.
    at = data.draw(st.integers(0, len(name.rstrip("0123456789")) - 1))
    with pytest.raises(UnknownBackendError) as caught:
        get_backend(name[:at] + "%" + name[at + 1 :])
    assert name in caught.value.nearest


@given(st.text(max_size=20))
def test_only_upper_case_identifiers_are_names(name):
    valid = (
        bool(name)
        and name[0] in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        and all(c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_" for c in name)
    )
    if valid:
        return
    with pytest.raises(ValueError, match="a backend's name is upper case"):
        register(name=name, **FIELDS)(lambda: Kernels(None))


def test_registering_and_loading(clean_registry):
    loads = []

    @register(name="TEST_BACKEND", **FIELDS)
    def load() -> Kernels:
        loads.append(1)
        return Kernels(lambda q, k, v, softmax_scale, is_causal: q)

    assert not loads
    spec = get_backend("test-backend")
    spec.load()
    spec.load()
    assert loads == [1]
    with pytest.raises(ValueError, match="TEST_BACKEND is registered already"):
        register(name="TEST_BACKEND", **FIELDS)(load)


@pytest.mark.parametrize(
    "change",
    [
        {"precisions": {"float32": "exact"}},
        {"precisions": {}},
        {"summary": "no full stop"},
        {"device_types": ("tpu",)},
    ],
)
def test_fields_that_are_off_are_refused(change):
    with pytest.raises(ValueError, match="TEST_OFF"):
        register(name="TEST_OFF", **(FIELDS | change))(lambda: Kernels(None))


def test_every_field_is_kept(clean_registry):
    fields = FIELDS | {
        "head_dims": (8,),
        "device_types": ("cuda",),
        "min_compute_capability": (8, 0),
        "modules": ("triton",),
        "probe": lambda _: None,
        "emulated_on": ("cpu",),
        "needs_contiguous": True,
        "cuda_graphs": False,
    }
    register(name="TEST_FIELDS", **fields)(Kernels)
    spec = get_backend("TEST_FIELDS")
    assert {name: getattr(spec, name) for name in fields} == fields
    assert {*fields} | {"name", "loader", "_kernels"} == {f.name for f in dataclasses.fields(spec)}


def test_a_loader_that_fails_is_an_unavailable_backend(clean_registry):
    @register(name="TEST_BROKEN", **FIELDS)
    def load() -> Kernels:
        raise OSError("no such library")

    with pytest.raises(attention_kernels.UnavailableBackendError, match="OSError: no such library"):
        get_backend("TEST_BROKEN").load()


@pytest.mark.parametrize("wrong", [lambda q: q.transpose(1, 2), lambda q: q.double()])
def test_an_output_that_does_not_look_like_q_is_refused(wrong, clean_registry):
    register(name="TEST_LAYOUT", **FIELDS)(
        lambda: Kernels(lambda q, k, v, softmax_scale, is_causal: wrong(q))
    )
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(OutputError, match="TEST_LAYOUT returned"):
        get_backend("TEST_LAYOUT").attention(q, q, q)


def test_decode_is_checked_as_attention_is(clean_registry):
    register(name="TEST_DECODE", **FIELDS)(
        lambda: Kernels(None, lambda q, k_cache, v_cache, seqlens, softmax_scale: q.mT)
    )
    q, cache = torch.randn(1, 1, 2, 8), torch.randn(1, 4, 2, 8)
    seqlens = torch.ones(1, dtype=torch.int32)
    decode = get_backend("TEST_DECODE").decode
    with pytest.raises(OutputError, match="TEST_DECODE returned"):
        decode(q, cache, cache, seqlens)
    with pytest.raises(UnsupportedError, match=r"dtype float64 \(it takes float32\)"):
        decode(q.double(), cache.double(), cache.double(), seqlens)


def test_needs_contiguous_is_met(clean_registry):
    seen = []

    def kernel(q, k, v, softmax_scale, is_causal):
        seen.extend([q, k, v])
        return q

    for needs in (True, False):
        name = f"TEST_CONTIGUOUS_{needs}".upper()
        register(name=name, needs_contiguous=needs, **FIELDS)(lambda: Kernels(kernel))
        get_backend(name).attention(*torch.randn(1, 4, 3, 2, 8).unbind(2))
        assert all(x.is_contiguous() == needs for x in seen)
        seen.clear()


def test_missing_modules_and_devices_are_reasons(clean_registry):
    register(name="TEST_MODULE", modules=("not_a_module", "os"), **FIELDS)(Kernels)
    assert (
        "needs the Python package not_a_module" in get_backend("TEST_MODULE").unavailable_reason()
    )
    register(name="TEST_CPU", device_types=("cpu",), **FIELDS)(lambda: Kernels(None))
    assert get_backend("TEST_CPU").unavailable_reason("cpu") is None
    assert "runs on cpu only" in get_backend("TEST_CPU").unavailable_reason("cuda")


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ((7, 5), "needs compute capability 8.0 or higher, and this device has 7.5"),
        ((8, 0), None),
        ((12, 0), None),
    ],
)
def test_a_device_that_is_too_old_is_a_reason(capability, reason, clean_registry, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    register(name="TEST_OLD", min_compute_capability=(8, 0), **FIELDS)(Kernels)
    assert get_backend("TEST_OLD").unavailable_reason("cuda") == reason


def run_python(code: str, path: Path | None = None) -> str:
    prefix = f"import sys; sys.path.insert(0, {str(path)!r})\n" if path else ""
    done = subprocess.run(
        [sys.executable, "-c", prefix + code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_is_free():
    out = run_python(
        "import sys, attention_kernels, gpt2_infer, torch\n"
        "from attention_kernels import list_backends\n"
        "names = [spec.name for spec in list_backends()]\n"
        "print(torch.cuda.is_initialized(), 'triton' in sys.modules, 'transformers' in sys.modules,"
        " 'torch.utils.cpp_extension' in sys.modules)"
    )
    assert out.split() == ["False"] * 4


def install_plugin(folder: Path, package: str, code: str) -> None:
    (folder / f"{package}.py").write_text(code)
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[attention_kernels.backends]\n{package} = {package}\n")


def test_plugins_register_and_a_broken_one_breaks_nothing(tmp_path):
    install_plugin(
        tmp_path,
        "good_plugin",
        "from attention_kernels import register\n"
        "from attention_kernels.contract import Kernels\n"
        "@register(name='PLUGGED_IN', family='plug-in', summary='From elsewhere.',\n"
        "          precisions={'float32': 'ieee-fp32'})\n"
        "def load():\n"
        "    return Kernels(lambda q, k, v, softmax_scale, is_causal: v.contiguous())\n",
    )
    install_plugin(tmp_path, "bad_plugin", "raise ImportError('libfoo.so is missing')\n")
    out = run_python(
        "import torch\nfrom attention_kernels import list_backends, get_backend, attention\n"
        "q = torch.ones(1, 2, 1, 4)\n"
        "print(attention(q, q, q, backend='plugged-in').sum().item())\n"
        "print(get_backend('BAD_PLUGIN').unavailable_reason())\n"
        "print(len(list_backends()))",
        tmp_path,
    ).splitlines()
    assert out[0] == "8.0"
    assert out[1] == "its plug-in failed to load: ImportError: libfoo.so is missing"
    assert int(out[2]) == len(NAMES) + 2


def test_half_a_registry_is_never_gone_on_with(monkeypatch):
    """A module of our own that cannot be imported fails every call, not only the first."""
    from attention_kernels import registry

    def fail(name):
        raise ImportError(name)

    monkeypatch.setattr(registry, "_discovered", False)
    monkeypatch.setattr(registry, "_specs", {})
    monkeypatch.setattr(registry.importlib, "import_module", fail)
    for _ in range(2):
        with pytest.raises(ImportError):
            list_backends()
