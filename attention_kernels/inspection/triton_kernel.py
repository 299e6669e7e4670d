"""Compile Triton kernels for a GPU that need not be here, and predict them.

Of the tiles that a backend's autotuner would try, the one with the shortest prediction counts.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.errors import TritonError

from attention_kernels.backends.triton import flash_attention
from attention_kernels.errors import UnsupportedError
from attention_kernels.inspection import binary, explain, predict
from attention_kernels.inspection.binary import BinaryError, Request
from attention_kernels.inspection.blocks import WARP
from attention_kernels.inspection.explain import Explanation
from attention_kernels.inspection.gpus import GpuModel
from attention_kernels.inspection.launches import Launch
from attention_kernels.inspection.predict import Case, LaunchModel, Prediction
from attention_kernels.inspection.program import Program

_TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
}
_DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
}
_BUFFER = re.compile(rf"({'|'.join(_DTYPES)})\[(\d+)\]")
_THREADS = (32, 64, 128, 256, 512, 1024)
BACKENDS = {"TRITON_FLASH_ATTENTION": False, "TRITON_FLASH_ATTENTION_TRANSPOSED_K": True}
"""Whether a backend loads K transposed, by its name."""


def compile_kernel(
    kernel: Any, values: Sequence[Any], gpu: GpuModel, options: Mapping[str, Any], folder: Path
) -> tuple[Program, Launch]:
    """Compile a kernel for its arguments; return its machine code and a launch of one block.

    kernel: made by triton.jit. values: one per parameter; tensors on the device "meta". As in a
    real launch, Triton knows which numbers are 1 or multiples of 16. Leaves the cubin in the folder
    as binary.CUBIN. Raises the errors of binary.load().
    """
    signature: dict[str, str] = {}
    constants, attributes, passed = {}, {}, []
    for number, (parameter, value) in enumerate(zip(kernel.params, values, strict=True)):
        kind = _type_of(value)
        is_special = kind in ("i32", "i64") and not parameter.do_not_specialize
        if parameter.is_constexpr or (is_special and value == 1):
            constants[(number,)], kind = value, "constexpr"
        else:
            passed.append(value)
            if kind.startswith("*") or (is_special and value % 16 == 0):
                attributes[(number,)] = [["tt.divisibility", 16]]
        signature[parameter.name] = kind
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", int(gpu.arch), WARP)
    compiled = triton.compile(source, target=target, options=dict(options))
    (folder / binary.CUBIN).write_bytes(compiled.asm["cubin"])
    path, symbol = Path(kernel.fn.__code__.co_filename), compiled.metadata.name
    program, parameters = binary.load(folder / binary.CUBIN, symbol, gpu, path)
    # Pointers to the scratch memory that Triton could allocate follow the kernel's own arguments.
    texts = [_text(value) for value in passed]
    texts += ["0"] * (len(parameters) - len(texts))
    packed, _ = binary.pack(texts, parameters, path.name)
    block = WARP * compiled.metadata.num_warps, 1, 1
    shared = compiled.metadata.shared
    return program, Launch(0, symbol, symbol, (1, 1, 1), block, shared, packed)


def read(request: Request, gpu: GpuModel, folder: Path) -> tuple[Program, Launch, int]:
    """Execute a Python file and compile a Triton kernel in it; see binary.read().

    Every parameter needs an argument, also tl.constexpr: a buffer such as `f32[1024]` or a number.
    Raises BinaryError and the errors of compile_kernel().
    """
    name = request.path.name
    if request.block not in [(threads, 1, 1) for threads in _THREADS]:
        sizes = ", ".join(map(str, _THREADS))
        raise BinaryError(name, f"--block of a Triton kernel is one of {sizes}")
    if request.dynamic_smem is not None:
        raise BinaryError(name, "Triton chooses the shared memory: leave out --shared")
    kernel = _kernel_of(request)
    names = [parameter.name for parameter in kernel.params]
    if len(request.arguments) != len(names):
        given = f"{len(request.arguments)} arguments for {len(names)} parameters"
        raise BinaryError(name, f"{given}, {', '.join(names)}")
    values = [_value(text, request) for text in request.arguments]
    try:
        options = {"num_warps": request.block[0] // WARP}
        program, launch = compile_kernel(kernel, values, gpu, options, folder)
    except TritonError as error:
        raise BinaryError(name, f"Triton cannot compile {request.kernel}: {error}") from error
    size = sum(value.numel() * value.itemsize for value in values if isinstance(value, Tensor))
    return program, dataclasses.replace(launch, grid=request.grid), size


def _kernel_of(request: Request) -> Any:
    """Execute a Python file and return its function of triton.jit that a launch names."""
    path = request.path
    if not path.is_file():
        raise BinaryError(path.name, f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"kernels_of_{path.stem}", path)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        reason = f"it cannot be imported: {type(error).__name__}: {error}"
        raise BinaryError(path.name, reason) from error
    kernels = {k: v for k, v in vars(module).items() if isinstance(v, triton.KernelInterface)}
    if request.kernel not in kernels:
        listed = ", ".join(kernels) or "none"
        reason = f"it has no kernel named {request.kernel} (of Triton: {listed})"
        raise BinaryError(path.name, reason)
    kernel = kernels[request.kernel]
    while not isinstance(kernel, triton.JITFunction):  # triton.autotune, triton.heuristics
        kernel = kernel.fn
    return kernel


def _value(text: str, request: Request) -> Tensor | int | float:
    """Return an argument: a tensor on the device "meta", or a number."""
    if found := _BUFFER.fullmatch(text):
        return torch.empty(int(found[2]), dtype=_DTYPES[found[1]], device="meta")
    try:
        return int(text, 0) if re.fullmatch(r"[-+]?(0x[0-9a-fA-F]+|\d+)", text) else float(text)
    except ValueError as error:
        kinds = f"a number, or a buffer such as f32[1024] (of {', '.join(_DTYPES)})"
        raise BinaryError(request.path.name, f"argument {text!r} is not {kinds}") from error


def predict_backend(
    name: str, gpu: GpuModel, cases: Sequence[Case], dtype: str
) -> list[Prediction]:
    """Predict a call of a backend in each case, with the tile that has the shortest prediction.

    name: one of BACKENDS. Raises UnsupportedError if no tile fits on the GPU, and SassError.
    """
    with tempfile.TemporaryDirectory() as folder:
        return [_fastest(name, gpu, case, dtype, Path(folder))[0] for case in cases]


def explain_backend(name: str, gpu: GpuModel, case: Case, dtype: str) -> Explanation:
    """Predict and explain a call of a backend; see predict_backend()."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        found, program, model = _fastest(name, gpu, case, dtype, folder)
        explained = explain.explain_launch(program, model, case, folder / binary.CUBIN)
    prediction = dataclasses.replace(explained.prediction, version=name, choice=found.choice)
    return dataclasses.replace(explained, prediction=prediction)


def _fastest(
    name: str, gpu: GpuModel, case: Case, dtype: str, folder: Path
) -> tuple[Prediction, Program, LaunchModel]:
    """Return the best tile's prediction and model; its cubin is left in the folder."""
    batch, seqlen, num_heads, head_dim, is_causal = case
    shape = batch, seqlen, num_heads, head_dim
    q = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    min_bytes = 4.0 * q.numel() * q.itemsize
    found = []
    reasons: dict[str, None] = {}
    for one in flash_attention.candidates(q, is_causal=is_causal, transposed_k=BACKENDS[name]):
        options = {"num_warps": one.tile.num_warps, "num_stages": one.tile.num_stages}
        program, launch = compile_kernel(one.kernel, one.values, gpu, options, folder)
        program = dataclasses.replace(program, label=name, heads_first=True)
        launch = dataclasses.replace(launch, head_dim=head_dim, grid=(*one.grid, 1))
        try:
            model = predict.model_of(program, launch, min_bytes)
        except UnsupportedError as error:  # the tile is too large for this GPU
            reasons |= dict.fromkeys(error.reasons)
            continue
        choice = " ".join(f"{key}={value}" for key, value in (one.tile.kwargs | options).items())
        timed = dataclasses.replace(predict.time_of(model), seqlen=seqlen, choice=choice)
        cubin = (folder / binary.CUBIN).read_bytes()
        found.append((timed, program, model, cubin))
    if not found:
        raise UnsupportedError(name, [*reasons])
    best, program, model, cubin = min(found, key=lambda one: one[0].time_us)
    (folder / binary.CUBIN).write_bytes(cubin)
    return best, program, model


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return "ptr"
    return str(int(value)) if isinstance(value, int) else repr(value)
