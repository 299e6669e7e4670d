"""Kernels of any file: the right one is found, gets its arguments, and is predicted."""

from __future__ import annotations

import struct

import pytest

from attention_kernels.inspection.sass import binary
from attention_kernels.inspection.sass.binary import BinaryError, Parameter, Request
from attention_kernels.inspection.sass.gpus import gpus
from attention_kernels.inspection.sass.predict import predict_kernel
from attention_kernels.ladder import compilers
from tests.attention_kernels.inspection.sass.test_predict import needs_cuda_programs

H200 = gpus()["h200"]
TERABYTE = 2**40
# What cuobjdump prints of a kernel `scale(Params, float)` with a struct of 24 bytes.
ELF = """
.nv.info.rescale
	Value:	Index : 0x0	Ordinal : 0x0	Offset  : 0x0	Size    : 0x8


.nv.info.scale
	<0x1>
	Attribute:	EIATTR_KPARAM_INFO
	Format:	EIFMT_SVAL
	Value:	Index : 0x0	Ordinal : 0x1	Offset  : 0x18	Size    : 0x4
		Pointee's logAlignment : 0x0	Space : 0x0	cbank : 0x1f	Parameter Space : CBANK
	<0x2>
	Attribute:	EIATTR_KPARAM_INFO
	Format:	EIFMT_SVAL
	Value:	Index : 0x0	Ordinal : 0x0	Offset  : 0x0	Size    : 0x18


.text.scale
"""
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


def request(path, kernel="copy", arguments=("f32[1024]", "f32[1024]", "32")):
    return Request(path, kernel, (64, 3, 1), (32, 1, 1), arguments=arguments)


def test_parameters_are_read_in_their_order():
    assert binary._parameters(ELF, "scale") == [Parameter(0, 24), Parameter(24, 4)]


def test_arguments_are_packed_as_the_kernel_reads_them(tmp_path):
    (tmp_path / "struct").write_bytes(b"\1\2\3\4")
    sizes = [8, 2, 4, 8, 8, 4, 4, 2]
    offsets = [0, 8, 12, 16, 24, 32, 36, 40]
    parameters = [Parameter(*one) for one in zip(offsets, sizes, strict=True)]
    texts = ["f16[100]", "7", "-1", "bf16[8]", "ptr", "0.5", f"@{tmp_path / 'struct'}", "hex:0aff"]
    packed, size = binary.pack(texts, parameters, "f")
    buffers = [8 * TERABYTE, 11 * TERABYTE, 12 * TERABYTE]
    expected = struct.pack("<QH2xi2Qf", buffers[0], 7, -1, *buffers[1:], 0.5)
    assert packed == expected + b"\1\2\3\4\x0a\xff"
    assert size == 200 + 16


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["1"], "1 arguments for 2 parameters of 8, 4 bytes"),
        (["ptr", "ptr"], "argument 2, 'ptr', is not 4 bytes"),
        (["ptr", "5000000000"], "argument 2, '5000000000', is not 4 bytes"),
        (["ptr", "hex:00"], "argument 2, 'hex:00', is not 4 bytes: it has 1"),
        (["float", "1"], "argument 1, 'float', is not 8 bytes: could not convert"),
        (["@/nonexistent", "1"], "argument 1, '@/nonexistent', is not 8 bytes"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(texts, words):
    with pytest.raises(BinaryError) as caught:
        binary.pack(texts, [Parameter(0, 8), Parameter(8, 4)], "f.so")
    assert words in str(caught.value)


def test_a_part_of_a_name_stands_for_the_one_kernel_that_has_it(tmp_path):
    names = ["_Z4copyILi1EEvv", "_Z4copyILi32EEvv", "scale"]
    assert binary._choose(request(tmp_path, "Li32E"), names) == names[1]
    assert binary._choose(request(tmp_path, "scale"), [*names, "rescale"]) == "scale"
    with pytest.raises(BinaryError, match=r"several kernels match copy .*Li1EEvv, _Z4copyILi32"):
        binary._choose(request(tmp_path, "copy"), names)
    with pytest.raises(BinaryError, match=r"no kernel named move .*copyILi1EEvv.*scale"):
        binary._choose(request(tmp_path, "move"), names)


@pytest.mark.slow
@needs_cuda_programs
def test_a_kernel_of_a_library_is_predicted_as_that_of_its_source(tmp_path):
    source, library = tmp_path / "copies.cu", tmp_path / "libcopies.so"
    source.write_text(SOURCE)
    flags = ["-lineinfo", "-O3", "-std=c++17", "-shared", "-Xcompiler=-fPIC"]
    flags += [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in (80, 90)]
    nvcc = str(compilers.find_nvcc())
    compilers.output_of([nvcc, *flags, str(source), "-o", str(library)])
    free, conflicts = (predict_kernel(request(library, f"Li{n}E"), H200) for n in (1, 32))
    assert conflicts.load_wavefronts == 32 * free.load_wavefronts
    # Blocks along the first axis do more and more rows, those along the second the same.
    assert free.store_wavefronts == 3 * sum(range(1, 65))
    explained = predict_kernel(request(source, "Li32E"), H200, lines=True)
    assert explained.load_wavefronts == conflicts.load_wavefronts
    assert explained.stalls.lines[0].source.startswith(("sX[", "y[row"))
    with pytest.raises(BinaryError, match="machine code for sm_80, sm_90, not for sm_75"):
        predict_kernel(request(library, "Li1E"), gpus()["t4"])
