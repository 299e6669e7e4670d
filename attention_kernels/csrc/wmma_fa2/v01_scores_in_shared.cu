// v01 - tensor cores through WMMA, scores in shared memory
//
// Change: the first version. A block is one warp and owns 16 queries; it walks over the keys in
//         tiles of 32. WMMA computes both products, with half fragments and float accumulators. S,
//         P and O are in shared memory, where two lanes share a row; O is divided by row_sum in
//         global memory.
// Why:    CUDA does not specify which elements of a fragment a lane holds, and the softmax needs
//         whole rows. Shared memory has rows.
// Cost:   S, P and O move between fragments and shared memory in every tile. The lanes are 16
//         floats apart in S and 32 in O: bank conflicts there, and uncoalesced accesses at the end.
// Tile:   kBlockM x kBlockN = 16 x 32, block 32
// Layout: contiguous
// Takes:  float16, head_dim 64
// Flags:  (none)
// Expect: far from any hardware limit: the single warp waits for each step in turn. Bank conflicts:
//         16-way on S, 32-way on O, 8-way on loads of K and V fragments.

// V must be finite, as for most tensor-core kernels: where a query does not see a key of its tile,
// P is 0, but the product still adds 0 * V to the sum.

#include <mma.h>

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

namespace wmma = nvcuda::wmma;

constexpr int kHeadDim = 64;
constexpr int kBlockM = 16;
constexpr int kBlockN = 32;
constexpr int kThreads = 32;
constexpr int kTile = 16;                              // a fragment is kTile x kTile
constexpr int kLaneN = kBlockM * kBlockN / kThreads;   // columns of S per lane, half a row
constexpr int kLaneD = kBlockM * kHeadDim / kThreads;  // columns of O per lane, half a row

template <typename Use, typename... Layout>
using Fragment = wmma::fragment<Use, kTile, kTile, kTile, Layout...>;
using FragmentQ = Fragment<wmma::matrix_a, half, wmma::row_major>;
using FragmentK = Fragment<wmma::matrix_b, half, wmma::col_major>;  // K's rows are K^T's columns
using FragmentP = Fragment<wmma::matrix_a, half, wmma::row_major>;
using FragmentV = Fragment<wmma::matrix_b, half, wmma::row_major>;
using FragmentO = Fragment<wmma::accumulator, float>;

// Copies `rows` rows to shared memory. Rows from valid_rows on are past the end and become zero.
inline __device__ void load_tile(half* s_tile, const half* g_tile, int g_stride, int rows,
                                 int valid_rows) {
  constexpr int kVector = 8;  // halves in 16 bytes
  for (int i = threadIdx.x; i < rows * kHeadDim / kVector; i += kThreads) {
    const int r = kVector * i / kHeadDim;
    const int d = kVector * i % kHeadDim;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (r < valid_rows) x = *reinterpret_cast<const uint4*>(g_tile + r * g_stride + d);
    *reinterpret_cast<uint4*>(s_tile + r * kHeadDim + d) = x;
  }
}

// Counts the keys of the tile at n_start that `row` sees. The causal mask is top-left aligned.
inline __device__ int visible_keys(int row, int n_start, int seqlen, bool is_causal) {
  return min(kBlockN, (is_causal ? min(row + 1, seqlen) : seqlen) - n_start);
}

__global__ void __launch_bounds__(kThreads)
    attention_kernel(const half* __restrict__ q, const half* __restrict__ k,
                     const half* __restrict__ v, half* __restrict__ o, float* __restrict__ scratch,
                     int seqlen, int num_heads, float softmax_scale, bool is_causal) {
  const int lane_id = threadIdx.x;
  const int m_start = blockIdx.y * kBlockM;
  const int row = m_start + lane_id / 2;
  const int batch = blockIdx.x / num_heads;
  const int head = blockIdx.x % num_heads;
  const int row_stride = num_heads * kHeadDim;
  const int64_t offset = (int64_t{batch} * seqlen * num_heads + head) * kHeadDim;
  const half* gQ = q + offset + int64_t{m_start} * row_stride;
  half* gO = o + offset + int64_t{m_start} * row_stride;
  // O in float, the type in which its fragments are stored.
  float* gO_float = scratch + (int64_t{blockIdx.x} * gridDim.y + blockIdx.y) * (kBlockM * kHeadDim);

  __shared__ __align__(32) half sQ[kBlockM * kHeadDim];
  __shared__ __align__(32) half sK[kBlockN * kHeadDim];
  __shared__ __align__(32) half sV[kBlockN * kHeadDim];
  __shared__ __align__(32) float sS[kBlockM * kBlockN];
  __shared__ __align__(32) half sP[kBlockM * kBlockN];
  __shared__ __align__(32) float sO[kBlockM * kHeadDim];

  load_tile(sQ, gQ, row_stride, kBlockM, seqlen - m_start);
  __syncwarp();
  FragmentQ rQ[kHeadDim / kTile];
  for (int d = 0; d < kHeadDim / kTile; ++d) {
    wmma::load_matrix_sync(rQ[d], sQ + d * kTile, kHeadDim);
  }
  for (int i = 0; i < kLaneD; ++i) {
    sO[kLaneD * lane_id + i] = 0.0f;
  }
  float row_max = -INFINITY;
  float row_sum = 0.0f;

  // No query of this block sees any key from n_end on.
  const int n_end = is_causal ? min(m_start + kBlockM, seqlen) : seqlen;
  for (int n_start = 0; n_start < n_end; n_start += kBlockN) {
    const int64_t start = offset + int64_t{n_start} * row_stride;
    load_tile(sK, k + start, row_stride, kBlockN, n_end - n_start);
    load_tile(sV, v + start, row_stride, kBlockN, n_end - n_start);
    __syncwarp();

    // S = Q K^T
    for (int n = 0; n < kBlockN; n += kTile) {
      FragmentO rS;
      wmma::fill_fragment(rS, 0.0f);
      for (int d = 0; d < kHeadDim / kTile; ++d) {
        FragmentK rK;
        wmma::load_matrix_sync(rK, sK + n * kHeadDim + d * kTile, kHeadDim);
        wmma::mma_sync(rS, rQ[d], rK, rS);
      }
      wmma::store_matrix_sync(sS + n, rS, kBlockN, wmma::mem_row_major);
    }
    __syncwarp();

    // P = exp(softmax_scale * S - row_max), and the running row statistics
    const int n_lane = lane_id % 2 * kLaneN;
    const int visible = visible_keys(row, n_start, seqlen, is_causal);
    float tile_max = -INFINITY;
    for (int i = 0; i < kLaneN; ++i) {
      float& s = sS[kLaneN * lane_id + i];
      s = n_lane + i < visible ? softmax_scale * s : -INFINITY;
      tile_max = fmaxf(tile_max, s);
    }
    tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffff, tile_max, 1));
    const float new_max = fmaxf(row_max, tile_max);
    const float row_scale = __expf(row_max - new_max);
    row_max = new_max;
    __syncwarp();  // or the compiler would keep S in registers, as v02 does
    float tile_sum = 0.0f;
    for (int i = 0; i < kLaneN; ++i) {
      const float p = __expf(sS[kLaneN * lane_id + i] - row_max);
      sP[kLaneN * lane_id + i] = __float2half(p);
      tile_sum += p;
    }
    row_sum = row_scale * row_sum + tile_sum + __shfl_xor_sync(0xffffffff, tile_sum, 1);
    for (int i = 0; i < kLaneD; ++i) {
      sO[kLaneD * lane_id + i] *= row_scale;
    }
    __syncwarp();

    // O += P V
    for (int d = 0; d < kHeadDim; d += kTile) {
      FragmentO rO;
      wmma::load_matrix_sync(rO, sO + d, kHeadDim, wmma::mem_row_major);
      for (int n = 0; n < kBlockN; n += kTile) {
        FragmentP rP;
        FragmentV rV;
        wmma::load_matrix_sync(rP, sP + n, kBlockN);
        wmma::load_matrix_sync(rV, sV + n * kHeadDim + d, kHeadDim);
        wmma::mma_sync(rO, rP, rV, rO);
      }
      wmma::store_matrix_sync(sO + d, rO, kHeadDim, wmma::mem_row_major);
    }
    __syncwarp();
  }

  for (int d = 0; d < kHeadDim; d += kTile) {
    FragmentO rO;
    wmma::load_matrix_sync(rO, sO + d, kHeadDim, wmma::mem_row_major);
    wmma::store_matrix_sync(gO_float + d, rO, kHeadDim, wmma::mem_row_major);
  }
  __syncwarp();
  for (int i = 0; i < kLaneD; ++i) {
    gO_float[kLaneD * lane_id + i] /= row_sum;
  }
  if (row < seqlen) {
    half* gO_row = gO + lane_id / 2 * row_stride + lane_id % 2 * kLaneD;
    for (int i = 0; i < kLaneD; ++i) {
      gO_row[i] = __float2half(gO_float[kLaneD * lane_id + i]);
    }
  }
}

int64_t scratch_floats(const Params& params) {
  return int64_t{params.batch} * params.num_heads * ceil_div(params.seqlen, kBlockM) *
         (kBlockM * kHeadDim);
}

cudaError_t launch(const Params& params, cudaStream_t stream) {
  if (params.head_dim != kHeadDim) return cudaErrorInvalidValue;
  const dim3 grid(params.batch * params.num_heads, ceil_div(params.seqlen, kBlockM));
  return launch_kernel(attention_kernel, grid, kThreads, 0, stream,
                       static_cast<const half*>(params.q), static_cast<const half*>(params.k),
                       static_cast<const half*>(params.v), static_cast<half*>(params.o),
                       params.scratch, params.seqlen, params.num_heads, params.softmax_scale,
                       params.is_causal);
}

}  // namespace attention::ATTENTION_VERSION
