"""nvcc compiles the application's own kernels, on any machine that has it."""

from __future__ import annotations

import pytest
import torch

from attention_kernels.inspection import resources
from attention_kernels.ladder import compilers, header
from gpt2_infer.config import GPT2Config
from gpt2_infer.engines import batch_step
from gpt2_infer.engines.fused import StepShape
from gpt2_infer.product import CSRC

PORTABLE = StepShape(GPT2Config(), torch.float32, 1, 128, 99 * 1024, is_portable=True)
EARLY = StepShape(GPT2Config(), torch.bfloat16, 1, 132, 227 * 1024)
VERSIONS = [
    ("80", header.parse_header(CSRC / "v01_matrix_product.cu", "matrix_product_")),
    ("80", header.parse_header(CSRC / "v02_three_products.cu", "matrix_product_")),
    ("90", header.parse_header(CSRC / "v04_wgmma.cu", "matrix_product_")),
    ("90", header.parse_header(CSRC / "v03_ends.cu", "recompute_")),
    *(("80", build) for build in header.parse_header(batch_step.SOURCE, "batch_step_").builds()),
    *(("80", PORTABLE.version()), ("120", PORTABLE.version()), ("90", EARLY.version())),
]


@pytest.mark.slow
@pytest.mark.skipif(not compilers.find_nvcc(), reason="needs nvcc")
@pytest.mark.parametrize(("arch", "version"), VERSIONS)
def test_nvcc_compiles_every_kernel(arch, version):
    assert resources.compile_version(version, arch)[0]
