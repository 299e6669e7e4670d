// v08 - any head_dim, any strides
//
// Change: the kernel is a template over head_dim (32, 64 and 128), and q, k and v may have any
//         strides, except that head_dim is contiguous.
// Why:    the original leaves these two open. GPT-2 computes q, k and v as one tensor; views into
//         it need no copies.
// Cost:   more kernel arguments. A warp keeps its rows of Q and O in registers: with head_dim 128
//         the tiles have 32 keys, and a multiprocessor has registers for two blocks, not three.
// Tile:   kBlockM x kBlockN = 64 x 64, block 128; 64 x 32 for head_dim 128
// Layout: strided
// Takes:  float16
// Flags:  --use_fast_math
// Expect: the kernel takes a few percent longer, because each copy address has a 64-bit stride; the
//         copies before it are gone.

// V must be finite, as for most tensor-core kernels: where a query does not see a key of its tile,
// P is 0, but the product still adds 0 * V to the sum.

#include <cuda_pipeline.h>
#include <mma.h>

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

namespace wmma = nvcuda::wmma;

constexpr int kWarpSize = 32;
constexpr int kWarps = 4;
constexpr int kBlockM = 16 * kWarps;
constexpr int kThreads = kWarpSize * kWarps;
constexpr int kStages = 2;  // tiles of K and V: one in use, the other in flight
constexpr unsigned kAllLanes = 0xffffffff;
constexpr int kTile = 16;     // a fragment is kTile x kTile
constexpr int kElements = 8;  // elements of an accumulator per lane
constexpr int kVector = 8;    // halves in 16 bytes
constexpr int kPad = 8;  // halves: 8 rows then have the same column in 8 different groups of banks
constexpr int kStrideP = kTile + kPad;

template <typename Use, typename... Layout>
using Fragment = wmma::fragment<Use, kTile, kTile, kTile, Layout...>;
using FragmentQ = Fragment<wmma::matrix_a, half, wmma::row_major>;
using FragmentK = Fragment<wmma::matrix_b, half, wmma::col_major>;  // K's rows are K^T's columns
using FragmentP = Fragment<wmma::matrix_a, half, wmma::row_major>;
using FragmentV = Fragment<wmma::matrix_b, half, wmma::row_major>;
using FragmentO = Fragment<wmma::accumulator, float>;
static_assert(FragmentO::num_elements == kElements && FragmentP::num_elements == 2 * kElements);

// The rows and columns of a lane's accumulator elements, and who shares them.
struct ElementMap {
  unsigned rows;      // 4 bits per element of this lane
  unsigned columns;   // likewise
  unsigned elements;  // bit b: elements i and i ^ 2^b share a row, for every i and lane
  unsigned lanes;     // bit b: lanes l and l ^ 2^b share their rows
  bool is_like_p;     // each lane of matrix_a has the same elements, twice

  __device__ int row(int i) const { return rows >> (4 * i) & 15; }
  __device__ int column(int i) const { return columns >> (4 * i) & 15; }
};

// All threads of the block call it, with kIndexBytes of shared memory.
constexpr int kIndexBytes = kTile * kTile * (sizeof(float) + sizeof(half));
inline __device__ ElementMap ask_fragments(float* s_index) {
  half* s_half_index = reinterpret_cast<half*>(s_index + kTile * kTile);
  for (int i = threadIdx.x; i < kTile * kTile; i += kThreads) {
    s_index[i] = static_cast<float>(i);
    s_half_index[i] = __float2half(static_cast<float>(i));
  }
  __syncthreads();
  FragmentO index;
  FragmentP half_index;
  wmma::load_matrix_sync(index, s_index, kTile, wmma::mem_row_major);
  wmma::load_matrix_sync(half_index, s_half_index, kTile);

  ElementMap map{};
  for (int i = 0; i < kElements; ++i) {
    map.rows |= static_cast<unsigned>(index.x[i]) / kTile << (4 * i);
    map.columns |= static_cast<unsigned>(index.x[i]) % kTile << (4 * i);
  }
  bool is_like_p = true;
  for (int i = 0; i < 2 * kElements; ++i) {
    is_like_p = is_like_p && __half2float(half_index.x[i]) == index.x[i % kElements];
  }
  map.is_like_p = __all_sync(kAllLanes, is_like_p);
  for (int b = 0; b < 3; ++b) {
    const unsigned first_of_pair = b == 0 ? 0x0f0f0f0f : b == 1 ? 0x00ff00ff : 0x0000ffff;
    const bool same = ((map.rows >> (4 << b) ^ map.rows) & first_of_pair) == 0;
    map.elements |= __all_sync(kAllLanes, same) ? 1 << b : 0;
  }
  for (int b = 0; b < 5; ++b) {
    const bool same = __shfl_xor_sync(kAllLanes, map.rows, 1 << b) == map.rows;
    map.lanes |= __all_sync(kAllLanes, same) ? 1 << b : 0;
  }
  // A row has 2^4 elements. Every known layout passes this check.
  if (__popc(map.elements) + __popc(map.lanes) != 4) __trap();
  return map;
}

// Sets each element to op over its row. x is laid out like an accumulator.
template <typename Op>
inline __device__ void reduce_rows(float (&x)[kElements], const ElementMap& map, Op op) {
#pragma unroll
  for (int b = 0; b < 3; ++b) {
    if ((map.elements >> b & 1) == 0) continue;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if ((i >> b & 1) == 0) x[i] = x[i ^ 1 << b] = op(x[i], x[i ^ 1 << b]);
    }
  }
#pragma unroll
  for (int b = 0; b < 5; ++b) {
    if ((map.lanes >> b & 1) == 0) continue;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      x[i] = op(x[i], __shfl_xor_sync(kAllLanes, x[i], 1 << b));
    }
  }
}

// Starts copying kRows rows to shared memory. Rows past last_row become copies of other rows: such
// keys are masked, and such queries are not stored.
template <int kHeadDim, int kRows>
inline __device__ void copy_tile(half* s_tile, const half* g_tile, int64_t g_stride, int last_row) {
  constexpr int kRowVectors = kHeadDim / kVector;
  constexpr int kStep = kThreads / kRowVectors;
  static_assert(kThreads % kRowVectors == 0 && kRows % kStep == 0,
                "a thread stays in its columns, and all have as many rows");
  const int d = threadIdx.x % kRowVectors * kVector;
  int r = threadIdx.x / kRowVectors;
  const half* g_row = g_tile + min(r, last_row) * g_stride + d;
#pragma unroll
  for (int start = 0; start < kRows; start += kStep, r += kStep) {
    __pipeline_memcpy_async(s_tile + r * (kHeadDim + kPad) + d, g_row, sizeof(half) * kVector);
    if (r + kStep <= last_row) g_row += kStep * g_stride;
  }
}

struct __align__(16) Halfs {
  half2 x[kVector / 2];
};

// kBlocks must fit on a multiprocessor, as far as registers go.
template <int kHeadDim, int kBlockN, int kBlocks>
struct Shape {
  static constexpr int kTilesD = kHeadDim / kTile;
  static constexpr int kTilesN = kBlockN / kTile;
  static constexpr int kStride = kHeadDim + kPad;
  static constexpr int kStageHalfs = 2 * kBlockN * kStride;
  static constexpr int kStrideO = kHeadDim + 4;
  static constexpr int kTileBytes = sizeof(half) * kStages * kStageHalfs;
  static constexpr int kSmemBytes = kTileBytes + sizeof(half) * kBlockM * kStrideP;
  static_assert(kBlockM * kStride <= kStageHalfs, "Q is first where a later tile will be");
  static_assert(kIndexBytes <= kSmemBytes - kTileBytes, "fragments are asked where P will be");
  static_assert(sizeof(float) * kBlockM * (kStrideO + 1) <= kTileBytes,
                "O and its row_sum are last where tiles were");
};

template <int kHeadDim, int kBlockN, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    attention_kernel(const half* __restrict__ q, const half* __restrict__ k,
                     const half* __restrict__ v, half* __restrict__ o, Strides q_strides,
                     Strides k_strides, Strides v_strides, int seqlen, int num_heads,
                     float softmax_scale, bool is_causal) {
  using S = Shape<kHeadDim, kBlockN, kBlocks>;
  const int warp_id = threadIdx.x / kWarpSize;
  // Blocks start in index order: the last queries have the most keys, so they go first.
  const int m_block = gridDim.y - 1 - blockIdx.y;
  const int m_start = m_block * kBlockM;
  const int m_warp = m_start + warp_id * kTile;
  const int batch = blockIdx.x / num_heads;
  const int head = blockIdx.x % num_heads;
  const int64_t row_stride = int64_t{num_heads} * kHeadDim;
  const int64_t offset = (int64_t{batch} * seqlen * num_heads + head) * kHeadDim;
  const half* gQ = q + batch * q_strides.batch + head * q_strides.head + m_start * q_strides.seqlen;
  const half* gK = k + batch * k_strides.batch + head * k_strides.head;
  const half* gV = v + batch * v_strides.batch + head * v_strides.head;
  half* gO = o + offset + m_start * row_stride;

  ATTENTION_DYNAMIC_SHARED(half, smem);
  half* sP = smem + S::kTileBytes / sizeof(half);

  // No query of this block sees any key from n_end on.
  const int n_end = is_causal ? min(m_start + kBlockM, seqlen) : seqlen;
  const auto copy_keys = [&](int tile) {
    const int n_start = tile * kBlockN;
    if (n_start >= n_end) return;
    const int last_row = n_end - 1 - n_start;
    half* sK = smem + tile % kStages * S::kStageHalfs;
    half* sV = sK + kBlockN * S::kStride;
    copy_tile<kHeadDim, kBlockN>(sK, gK + n_start * k_strides.seqlen, k_strides.seqlen, last_row);
    copy_tile<kHeadDim, kBlockN>(sV, gV + n_start * v_strides.seqlen, v_strides.seqlen, last_row);
  };
  half* sQ = smem + (kStages - 1) * S::kStageHalfs;
  copy_tile<kHeadDim, kBlockM>(sQ, gQ, q_strides.seqlen, seqlen - 1 - m_start);
  copy_keys(0);
  __pipeline_commit();
  const ElementMap map = ask_fragments(reinterpret_cast<float*>(sP));
  __pipeline_wait_prior(0);
  __syncthreads();

  // P = exp2(score_scale * S - row_max), where score_scale is positive: Q takes its sign. row_max
  // is score_scale times the largest score, rounded. Rescaling subtracts two such numbers, which
  // gives exactly 0 if the maximum has not changed. A fused multiply-add would not: its product is
  // not rounded.
  const float score_scale = fmaxf(fabsf(softmax_scale) * 1.4426950408889634f, 1e-37f);
  FragmentQ rQ[S::kTilesD];
  for (int d = 0; d < S::kTilesD; ++d) {
    wmma::load_matrix_sync(rQ[d], sQ + warp_id * kTile * S::kStride + d * kTile, S::kStride);
    if (softmax_scale < 0.0f) {
      for (int i = 0; i < rQ[d].num_elements; ++i) rQ[d].x[i] = -rQ[d].x[i];
    }
  }
  FragmentO rO[S::kTilesD];
  for (int d = 0; d < S::kTilesD; ++d) wmma::fill_fragment(rO[d], 0.0f);
  // Statistics of each element's row
  float row_max[kElements];
  float row_sum[kElements];  // partial sums of this lane's elements
  for (int i = 0; i < kElements; ++i) {
    row_max[i] = -INFINITY;
    row_sum[i] = 0.0f;
  }

  for (int tile = 0; tile * kBlockN < n_end; ++tile) {
    __pipeline_wait_prior(0);
    __syncthreads();
    copy_keys(tile + 1);
    __pipeline_commit();
    const int n_start = tile * kBlockN;
    const half* sK = smem + tile % kStages * S::kStageHalfs;
    const half* sV = sK + kBlockN * S::kStride;

    // S = Q K^T
    FragmentO rS[S::kTilesN];
    for (int j = 0; j < S::kTilesN; ++j) wmma::fill_fragment(rS[j], 0.0f);
    for (int d = 0; d < S::kTilesD; ++d) {
      for (int j = 0; j < S::kTilesN; ++j) {
        FragmentK rK;
        wmma::load_matrix_sync(rK, sK + j * kTile * S::kStride + d * kTile, S::kStride);
        wmma::mma_sync(rS[j], rQ[d], rK, rS[j]);
      }
    }

    // The causal mask is top-left aligned.
    if (n_start + kBlockN > (is_causal ? min(m_warp + 1, seqlen) : seqlen)) {
      for (int i = 0; i < kElements; ++i) {
        const int visible = is_causal ? min(m_warp + map.row(i) + 1, seqlen) : seqlen;
        for (int j = 0; j < S::kTilesN; ++j) {
          if (n_start + j * kTile + map.column(i) >= visible) rS[j].x[i] = -INFINITY;
        }
      }
    }

    // P, and the running row statistics
    float new_max[kElements];
    for (int i = 0; i < kElements; ++i) {
      new_max[i] = rS[0].x[i];
      for (int j = 1; j < S::kTilesN; ++j) new_max[i] = fmaxf(new_max[i], rS[j].x[i]);
    }
    reduce_rows(new_max, map, [](float a, float b) { return fmaxf(a, b); });
    for (int i = 0; i < kElements; ++i) {
      new_max[i] = fmaxf(score_scale * new_max[i], row_max[i]);
      const float row_scale = exp2f(row_max[i] - new_max[i]);
      row_max[i] = new_max[i];
      row_sum[i] *= row_scale;
      for (int d = 0; d < S::kTilesD; ++d) rO[d].x[i] *= row_scale;
      for (int j = 0; j < S::kTilesN; ++j) {
        rS[j].x[i] = exp2f(score_scale * rS[j].x[i] - row_max[i]);
        row_sum[i] += rS[j].x[i];
      }
    }

    // O += P V
    FragmentP rP[S::kTilesN];
    if (map.is_like_p) {
      for (int j = 0; j < S::kTilesN; ++j) {
        for (int i = 0; i < kElements; ++i) {
          rP[j].x[i] = rP[j].x[i + kElements] = __float2half(rS[j].x[i]);
        }
      }
    } else {
      half* sP_warp = sP + warp_id * kTile * kStrideP;
      for (int j = 0; j < S::kTilesN; ++j) {
        for (int i = 0; i < kElements; ++i) {
          sP_warp[map.row(i) * kStrideP + map.column(i)] = __float2half(rS[j].x[i]);
        }
        __syncwarp();
        wmma::load_matrix_sync(rP[j], sP_warp, kStrideP);
        __syncwarp();
      }
    }
    for (int j = 0; j < S::kTilesN; ++j) {
      for (int d = 0; d < S::kTilesD; ++d) {
        FragmentV rV;
        wmma::load_matrix_sync(rV, sV + j * kTile * S::kStride + d * kTile, S::kStride);
        wmma::mma_sync(rO[d], rP[j], rV, rO[d]);
      }
    }
  }
  reduce_rows(row_sum, map, [](float a, float b) { return a + b; });
  __syncthreads();

  float* sO = reinterpret_cast<float*>(smem);
  float* s_sum = sO + kBlockM * S::kStrideO;
  for (int d = 0; d < S::kTilesD; ++d) {
    wmma::store_matrix_sync(sO + warp_id * kTile * S::kStrideO + d * kTile, rO[d], S::kStrideO,
                            wmma::mem_row_major);
  }
  for (int i = 0; i < kElements; ++i) {
    if (map.column(i) == 0) s_sum[warp_id * kTile + map.row(i)] = row_sum[i];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kBlockM * kHeadDim / kVector; i += kThreads) {
    const int r = i / (kHeadDim / kVector);
    const int d = i % (kHeadDim / kVector) * kVector;
    if (m_start + r >= seqlen) break;
    Halfs out;
    for (int j = 0; j < kVector / 2; ++j) {
      const float2 pair = *reinterpret_cast<const float2*>(sO + r * S::kStrideO + d + 2 * j);
      out.x[j] = __float22half2_rn(make_float2(pair.x / s_sum[r], pair.y / s_sum[r]));
    }
    *reinterpret_cast<Halfs*>(gO + r * row_stride + d) = out;
  }
}

int64_t scratch_floats(const Params&) { return 0; }

template <int kHeadDim, int kBlockN, int kBlocks>
cudaError_t launch_shape(const Params& params, cudaStream_t stream) {
  using S = Shape<kHeadDim, kBlockN, kBlocks>;
  const dim3 grid(params.batch * params.num_heads, ceil_div(params.seqlen, kBlockM));
  return launch_kernel(attention_kernel<kHeadDim, kBlockN, kBlocks>, grid, kThreads, S::kSmemBytes,
                       stream, static_cast<const half*>(params.q),
                       static_cast<const half*>(params.k), static_cast<const half*>(params.v),
                       static_cast<half*>(params.o), params.q_strides, params.k_strides,
                       params.v_strides, params.seqlen, params.num_heads, params.softmax_scale,
                       params.is_causal);
}

cudaError_t launch(const Params& params, cudaStream_t stream) {
  switch (params.head_dim) {
    case 32:
      return launch_shape<32, 64, 4>(params, stream);
    case 64:
      return launch_shape<64, 64, 3>(params, stream);
    case 128:
      return launch_shape<128, 32, 2>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace attention::ATTENTION_VERSION
