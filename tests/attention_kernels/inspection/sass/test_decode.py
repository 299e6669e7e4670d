"""Kernels of any file: the right one is found, gets its arguments, and is predicted."""

from __future__ import annotations

import struct

import pytest

from attention_kernels.inspection.sass import decode
from attention_kernels.inspection.sass.decode import BinaryError
from attention_kernels.inspection.sass.gpus import gpus
from attention_kernels.inspection.sass.predict import predict_kernel
from attention_kernels.ladder import compilers
from tests.attention_kernels.inspection.sass.common import H200, needs_cuda_programs

TERABYTE = 2**40
SOURCE = """
template <int kWays>
__global__ void copy(const float* x, float* y, int rows) {
  __shared__ float sX[32 * kWays];
  for (int row = 0; row <= blockIdx.x; ++row) {
    sX[threadIdx.x * kWays] = x[row * 32 + threadIdx.x];
    __syncthreads();
    y[row * 32 + threadIdx.x] = sX[(threadIdx.x ^ 1) * kWays] * rows;
    __syncthreads();
  }
}
template __global__ void copy<1>(const float*, float*, int);
template __global__ void copy<32>(const float*, float*, int);
"""


def test_arguments_are_packed_as_the_kernel_reads_them(tmp_path):
    """The last one is a buffer to which a pointer in the struct may point."""
    (tmp_path / "struct").write_bytes(b"\1\2\3\4")
    parameters = [(0, 8), (8, 2), (12, 4), (16, 8), (24, 8), (32, 4), (36, 4)]
    texts = ["f16[100]", "7", "-1", "bf16[8]", "ptr", "0.5", f"@{tmp_path / 'struct'}"]
    packed, size, words = decode.pack([*texts, "i32[2x8]=512"], parameters, "f")
    buffers = [8 * TERABYTE, 11 * TERABYTE, 12 * TERABYTE]
    expected = struct.pack("<QH2xi2Qf", buffers[0], 7, -1, *buffers[1:], 0.5)
    assert packed == expected + b"\1\2\3\4"
    assert (size, words) == (200 + 16 + 64, {15: 512})


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["1"], "1 arguments for 2 parameters of 8, 4 bytes"),
        (["ptr", "ptr"], "argument 2, 'ptr', is not 4 bytes"),
        (["ptr", "5000000000"], "argument 2, '5000000000', is not 4 bytes"),
        (["float", "1"], "argument 1, 'float', is not 8 bytes: could not convert"),
        (["@/nonexistent", "1"], "argument 1, '@/nonexistent', is not 8 bytes"),
        (["@/dev/null", "1"], "argument 1, '@/dev/null', is not 8 bytes: it has 0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(texts, words):
    with pytest.raises(BinaryError) as caught:
        decode.pack(texts, [(0, 8), (8, 4)], "f.cubin")
    assert words in str(caught.value)


def test_a_part_of_a_name_stands_for_the_one_kernel_that_has_it():
    names = ["_Z4copyILi1EEvv", "_Z4copyILi32EEvv", "scale"]
    assert decode.choose("Li32E", names, "f") == names[1]
    assert decode.choose("scale", [*names, "rescale"], "f") == "scale"
    with pytest.raises(BinaryError, match=r"several kernels match copy .*Li1EEvv, _Z4copyILi32"):
        decode.choose("copy", names, "f")
    with pytest.raises(BinaryError, match=r"no kernel named move .*copyILi1EEvv.*scale"):
        decode.choose("move", names, "f")


@pytest.mark.slow
@needs_cuda_programs
def test_a_kernel_of_a_cubin_is_predicted_as_that_of_its_source(tmp_path):
    source, cubin = tmp_path / "copies.cu", tmp_path / "copies.cubin"
    source.write_text(SOURCE)
    nvcc = str(compilers.find_nvcc())
    compilers.output_of([nvcc, "-arch=sm_90", "-cubin", "-O3", str(source), "-o", str(cubin)])
    launch = {"grid": (64, 3, 1), "block": (32, 1, 1), "args": ("f32[1024]", "f32[1024]", "32")}
    free, conflicts = (predict_kernel(cubin, H200, kernel=f"Li{n}E", **launch) for n in (1, 32))
    assert conflicts.load_wavefronts == 32 * free.load_wavefronts
    # Blocks along the first axis do more and more rows, those along the second the same.
    assert free.store_wavefronts == 3 * sum(range(1, 65))
    explained = predict_kernel(source, H200, kernel="Li32E", **launch, lines=True)
    assert explained.load_wavefronts == conflicts.load_wavefronts
    assert explained.stalls.lines[0].source.startswith(("sX[", "y[row"))
    with pytest.raises(BinaryError, match="code is for sm_90, and T4 is sm_75"):
        predict_kernel(cubin, gpus()["t4"], kernel="Li1E", **launch)
    # A library has the code of several GPUs: that which the GPU would run is taken.
    library = tmp_path / "copies.so"
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ("75", "90")]
    command = [nvcc, "-shared", "-Xcompiler=-fPIC", "-O3", *codes, str(source), "-o", str(library)]
    compilers.output_of(command)
    assert predict_kernel(library, H200, kernel="Li1E", **launch) == free
    assert predict_kernel(library, gpus()["t4"], kernel="Li1E", **launch).gpu == "T4"
    with pytest.raises(BinaryError, match="none of its cubins has a kernel named Li1E for GeForce"):
        predict_kernel(library, gpus()["rtx4090"], kernel="Li1E", **launch)
