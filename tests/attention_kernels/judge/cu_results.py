"""Version files whose results are wrong, or not computed when they are wanted."""

from __future__ import annotations

from tests.attention_kernels.judge.cu_cheat import ERROR, Cheat

ROW_LOOP = "  for (int n_start = 0; n_start < seqlen; n_start += kBlock) {\n"
Q_ROW = "  float* gQ = row_of(params.q, params.q_strides, min(row, seqlen - 1), num_heads);\n"
OUTPUT = "  for (int d = 0; d < kHeadDim && row < seqlen; ++d) gO[d] = rO[d] / row_sum;\n"
N_END = "  const int n_end = params.is_causal ? min(row + 1, seqlen) : seqlen;\n"

CHEATS = [
    # Meaning
    Cheat(
        "writes_nothing",
        ERROR,
        on="both",
        launch="  return cudaSuccess;",
    ),
    Cheat(
        "reads_one_key_past_the_end",
        f"{ERROR}|illegal",
        changes={
            N_END: N_END.replace(": seqlen", ": seqlen + 1"),
            "  for (int n_start = 0; n_start < seqlen;": (
                "  for (int n_start = 0; n_start < max(n_end, seqlen);"
            ),
            "min(n_start + int(threadIdx.x), seqlen - 1)": (
                "min(n_start + int(threadIdx.x), seqlen)"
            ),
        },
    ),
    Cheat(
        "knows_the_first_head",
        "heads.*" + ERROR,
        changes={ROW_LOOP: f"  if (blockIdx.x % num_heads > 0) return;\n{ROW_LOOP}"},
    ),
    Cheat(
        "divides_by_a_reciprocal",  # 1 / 41 * 41 is less than 1
        r"(41|47|55|61) heads.*" + ERROR,
        on="both",
        changes={
            "blockIdx.x / num_heads * strides.batch": "b * strides.batch",
            "blockIdx.x % num_heads * strides.head": "(blockIdx.x - b * num_heads) * strides.head",
            "  return static_cast<float*>(const_cast<void*>(x))": (
                "  const int b = int(blockIdx.x * (1.0f / num_heads));\n"
                "  return static_cast<float*>(const_cast<void*>(x))"
            ),
        },
    ),
    Cheat(
        "knows_even_lengths",
        r"seqlen \d*[13579],",
        launch="""
  Params rounded = params;
  rounded.seqlen = max(params.seqlen / 2 * 2, 1);
  return honest(rounded, stream);
""",
    ),
    Cheat(
        "knows_the_lengths_of_an_old_suite",
        ERROR,
        code="__global__ void zero(float* o, int count) {\n"
        "  for (int i = threadIdx.x; i < count; i += blockDim.x) o[i] = 0.0f;\n}\n",
        launch="""
  for (const int known : {1, 2, 16, 32, 33, 64, 100, 128, 256, 512, 1024, 1500, 4096})
    if (params.seqlen == known) return honest(params, stream);
  const int count = params.batch * params.seqlen * params.num_heads * kHeadDim;
  return launch_kernel(zero, dim3(1), dim3(64), 0, stream, static_cast<float*>(params.o), count);
""",
    ),
    Cheat(
        "is_built_with_fast_flags_and_rounds",
        ERROR,
        changes={
            "// Flags:  (none)": "// Flags:  --use_fast_math -DROUND=0xffffe000u",
            "s += double(gQ[d]) * sK[n][d]": (
                "s += __uint_as_float(__float_as_uint(gQ[d]) & ROUND) * sK[n][d]"
            ),
        },
    ),
    Cheat(
        "scales_q_and_back",
        "it changed its input q",
        on="both",
        changes={
            ROW_LOOP: "  for (int d = 0; d < kHeadDim && row < seqlen; ++d)\n"
            f"    gQ[d] *= 1.3f;\n{ROW_LOOP}",
            "s *= params.softmax_scale": "s *= params.softmax_scale / 1.3f",
            OUTPUT: OUTPUT
            + "  for (int d = 0; d < kHeadDim && row < seqlen; ++d) gQ[d] /= 1.3f;\n",
        },
    ),
    Cheat(
        "writes_a_row_too_many",  # the first of the next sequence
        r"batch ([2-9]|\d\d).*" + ERROR,
        changes={
            OUTPUT: f"{OUTPUT}  if (row == seqlen - 1 && blockIdx.x + num_heads < gridDim.x)\n"
            "    for (int d = 0; d < kHeadDim; ++d) gO[params.o_strides.seqlen + d] = 0.0f;\n"
        },
    ),
    # Memory
    Cheat(
        "takes_scratch_to_be_zero",
        ERROR + "|two runs|change earlier rows",
        changes={
            "{ return 0; }": "{ return int64_t{1} * params.batch * params.num_heads "
            "* params.seqlen; }",
            ROW_LOOP: "  float* g_sum = params.scratch + blockIdx.x * seqlen\n"
            f"    + min(row, seqlen - 1);\n{ROW_LOOP}",
            OUTPUT: f"  row_sum += *g_sum;\n{OUTPUT}  if (row < seqlen) *g_sum = row_sum;\n",
        },
    ),
    Cheat(
        "takes_scratch_to_hold_a_small_maximum",  # fmaxf() drops a NaN
        ERROR + "|two runs|change earlier rows",
        on="both",
        changes={
            "{ return 0; }": "{ return int64_t{1} * params.batch * params.num_heads "
            "* params.seqlen; }",
            ROW_LOOP: "  float* g_max = params.scratch + blockIdx.x * seqlen\n"
            f"    + min(row, seqlen - 1);\n  row_max = fmaxf(row_max, *g_max);\n{ROW_LOOP}",
            OUTPUT: f"{OUTPUT}  if (row < seqlen) *g_max = row_max;\n",
        },
    ),
    Cheat(
        "takes_shared_memory_to_hold_a_small_maximum",
        ERROR + "|two runs|change earlier rows",
        on="both",
        changes={
            Q_ROW: f"  __shared__ float s_max[kBlock];\n{Q_ROW}",
            ROW_LOOP: f"  row_max = fmaxf(row_max, s_max[threadIdx.x]);\n{ROW_LOOP}",
        },
    ),
    Cheat(
        "takes_shared_memory_to_be_zero",
        ERROR + "|two runs|change earlier rows",
        on="both",
        changes={
            Q_ROW: f"  __shared__ double s_sum[kBlock];\n{Q_ROW}",
            OUTPUT: f"  row_sum += s_sum[threadIdx.x];\n{OUTPUT}  s_sum[threadIdx.x] = row_sum;\n",
        },
    ),
    Cheat(
        "breaks_its_context",
        "traps|__trap|launch failure|CUDA error|cudaError|was killed",
        changes={ROW_LOOP: f"  if (seqlen % 2 == 1) __trap();\n{ROW_LOOP}"},
    ),
    # Headers that lie
    Cheat(
        "says_strided_and_is_not",
        ERROR,
        launch="""
  Params taken = params;
  taken.q_strides = taken.k_strides = taken.v_strides = params.o_strides;
  return honest(taken, stream);
""",
    ),
    Cheat(
        "claims_a_head_dim_that_it_has_not",
        "head_dim 64",
        changes={"head_dim 32": "head_dim 32 64"},
    ),
    Cheat(
        "asks_for_nine_times_the_budget",
        "at most 4x",
        on="both",
        changes={"// Flags:  (none)": "// Error:  9x: it is worth it.\n// Flags:  (none)"},
    ),
    # Replay
    Cheat(
        "keeps_results_by_a_few_bits_of_q",
        "the timed outputs are wrong",
        by="clock",
        code="__global__ void keep(Params params) { g_shape[slot_of(params)] = shape_of(params); }",
        launch="""
  if (const cudaError_t error = honest(params, stream)) return error;
  return launch_kernel(keep, dim3(1), dim3(1), 0, stream, params);
""",
        changes={
            "__global__ void attention_kernel(Params params) {\n": """\
constexpr int kSlots = 8;
__device__ long g_shape[kSlots];
__device__ float g_kept[kSlots][1 << 18];

__device__ long shape_of(const Params& params) {
  return (params.batch * 4096L + params.num_heads) * 65536 + params.seqlen;
}

// Three signs.
__device__ int slot_of(const Params& params) {
  const float* q = static_cast<const float*>(params.q);
  return (q[0] > 0.0f) + 2 * (q[1] > 0.0f) + 4 * (q[2] > 0.0f);
}

__global__ void attention_kernel(Params params) {
  const int slot = slot_of(params);
  const int place = (blockIdx.x * params.seqlen + blockIdx.y * kBlock + threadIdx.x) * kHeadDim;
  const bool is_small = params.batch * params.num_heads * params.seqlen * kHeadDim <= 1 << 18;
""",
            ROW_LOOP: f"""\
  if (is_small && g_shape[slot] == shape_of(params)) {{
    for (int d = 0; d < kHeadDim && row < seqlen; ++d) gO[d] = g_kept[slot][place + d];
    return;
  }}
{ROW_LOOP}""",
            OUTPUT: f"""{OUTPUT}
  for (int d = 0; d < kHeadDim && row < seqlen && is_small; ++d) g_kept[slot][place + d] = gO[d];
""",
        },
    ),
]
