// v06 - the baseline in double precision
//
// From:   v01
// Change: the types: q, k, v, o and everything between are double. The launch bounds ask for one
//         block per multiprocessor: shared memory allows few anyway, so the compiler need not spill
//         registers to fit more.
// Why:    to tell a wrong algorithm from rounding: the only error left is double's own.
// Cost:   four times the bytes of half precision, and 64-bit units, which are few on some GPUs.
// Tile:   kBlockM x kBlockN = 16 x 16, block 64
// Layout: strided
// Takes:  float64
// Flags:  (none)
// Expect: only for verification. head_dim 128 takes 66.4 KB of shared memory, more than sm_75 has.

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

using Element = double;      // type of q, k, v and o
using Accumulator = double;  // type of S, P, the running O and the statistics

constexpr int kBlockM = 16;
constexpr int kBlockN = 16;
constexpr int kThreads = 64;

// Copies kRows rows to shared memory, 16 bytes at a time. Rows from valid_rows on become zero.
template <int kRows, int kHeadDim>
inline __device__ void load_tile(Element* s_tile, const Element* g_tile, int64_t g_stride,
                                 int valid_rows) {
  constexpr int kVector = sizeof(uint4) / sizeof(Element);
  static_assert(kRows * kHeadDim % (kVector * kThreads) == 0, "every thread loads as much");
  for (int i = 0; i < kRows * kHeadDim; i += kVector * kThreads) {
    const int r = (i + kVector * threadIdx.x) / kHeadDim;
    const int d = (i + kVector * threadIdx.x) % kHeadDim;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (r < valid_rows) x = *reinterpret_cast<const uint4*>(g_tile + r * g_stride + d);
    *reinterpret_cast<uint4*>(s_tile + r * kHeadDim + d) = x;
  }
}

// Counts the keys of the tile at n_start that query `row` sees.
inline __device__ int visible_keys(int row, int reach, int n_start, int seqlen) {
  return min(min(row + reach, seqlen) - n_start, kBlockN);
}

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1)
    attention_kernel(const Element* __restrict__ q, const Element* __restrict__ k,
                     const Element* __restrict__ v, Element* __restrict__ o, Strides q_strides,
                     Strides k_strides, Strides v_strides, Strides o_strides, int seqlen,
                     int num_heads, Accumulator softmax_scale, bool is_causal) {
  // Blocks start in index order: the last queries have the most keys, so they go first.
  const int m_block = gridDim.y - 1 - blockIdx.y;
  const int m_start = m_block * kBlockM;
  const int batch = blockIdx.x / num_heads;
  const int head = blockIdx.x % num_heads;
  const Element* gQ =
      q + batch * q_strides.batch + head * q_strides.head + m_start * q_strides.seqlen;
  const Element* gK = k + batch * k_strides.batch + head * k_strides.head;
  const Element* gV = v + batch * v_strides.batch + head * v_strides.head;
  Element* gO = o + batch * o_strides.batch + head * o_strides.head + m_start * o_strides.seqlen;

  ATTENTION_DYNAMIC_SHARED(Accumulator, smem);
  Accumulator* sO = smem;
  Accumulator* sS = sO + kBlockM * kHeadDim;
  Accumulator* row_max = sS + kBlockM * kBlockN;
  Accumulator* row_sum = row_max + kBlockM;
  Accumulator* alpha = row_sum + kBlockM;  // factor that rescales earlier sums
  Element* sQ = reinterpret_cast<Element*>(alpha + kBlockM);
  Element* sK = sQ + kBlockM * kHeadDim;
  Element* sV = sK + kBlockN * kHeadDim;

  static_assert(kBlockM * kBlockN % kThreads == 0 && kBlockM * kHeadDim % kThreads == 0,
                "every thread has as many elements");
  static_assert(kBlockM <= kThreads, "a row has a thread");
  const int thread = threadIdx.x;
  load_tile<kBlockM, kHeadDim>(sQ, gQ, q_strides.seqlen, seqlen - m_start);
  for (int i = 0; i < kBlockM * kHeadDim; i += kThreads) {
    sO[i + thread] = 0;
  }
  if (thread < kBlockM) {
    row_max[thread] = -INFINITY;
    row_sum[thread] = 0;
  }

  // Query i sees the keys below i + reach: the causal mask is top-left aligned. No query of this
  // block sees any key from n_end on.
  const int reach = is_causal ? 1 : seqlen;
  const int n_end = min(m_start + kBlockM - 1 + reach, seqlen);
  for (int n_start = 0; n_start < n_end; n_start += kBlockN) {
    load_tile<kBlockN, kHeadDim>(sK, gK + n_start * k_strides.seqlen, k_strides.seqlen,
                                 n_end - n_start);
    load_tile<kBlockN, kHeadDim>(sV, gV + n_start * v_strides.seqlen, v_strides.seqlen,
                                 n_end - n_start);
    __syncthreads();

    // S = softmax_scale * Q K^T, or -infinity where the query does not see the key
    for (int i = 0; i < kBlockM * kBlockN; i += kThreads) {
      const int m = (i + thread) / kBlockN;
      const int n = (i + thread) % kBlockN;
      const int visible = visible_keys(m_start + m, reach, n_start, seqlen);
      Accumulator s = 0;
      for (int d = 0; d < kHeadDim; ++d) {
        s += Accumulator(sQ[m * kHeadDim + d]) * Accumulator(sK[n * kHeadDim + d]);
      }
      sS[m * kBlockN + n] = n < visible ? softmax_scale * s : -INFINITY;
    }
    __syncthreads();

    // The running maximum of each row, and alpha
    if (thread < kBlockM) {
      const int m = thread;
      Accumulator new_max = row_max[m];
      for (int n = 0; n < kBlockN; ++n) {
        new_max = fmax(new_max, sS[m * kBlockN + n]);
      }
      alpha[m] = exp(row_max[m] - new_max);
      row_max[m] = new_max;
    }
    __syncthreads();

    // P = exp(S - row_max), in place of S
    for (int i = 0; i < kBlockM * kBlockN; i += kThreads) {
      const int m = (i + thread) / kBlockN;
      const int n = (i + thread) % kBlockN;
      sS[m * kBlockN + n] = exp(sS[m * kBlockN + n] - row_max[m]);
    }
    __syncthreads();

    // O = alpha * O + P V. A masked P is 0, but V may be anything there: 0 * NaN is not 0.
    for (int i = 0; i < kBlockM * kHeadDim; i += kThreads) {
      const int m = (i + thread) / kHeadDim;
      const int d = (i + thread) % kHeadDim;
      const int visible = visible_keys(m_start + m, reach, n_start, seqlen);
      Accumulator acc = alpha[m] * sO[m * kHeadDim + d];
      for (int n = 0; n < visible; ++n) {
        acc += sS[m * kBlockN + n] * Accumulator(sV[n * kHeadDim + d]);
      }
      sO[m * kHeadDim + d] = acc;
    }

    // row_sum = alpha * row_sum + the sum of P
    if (thread < kBlockM) {
      const int m = thread;
      Accumulator sum = alpha[m] * row_sum[m];
      for (int n = 0; n < kBlockN; ++n) {
        sum += sS[m * kBlockN + n];
      }
      row_sum[m] = sum;
    }
    __syncthreads();
  }

  for (int i = 0; i < kBlockM * kHeadDim; i += kThreads) {
    const int m = (i + thread) / kHeadDim;
    const int d = (i + thread) % kHeadDim;
    if (m_start + m < seqlen) {
      gO[m * o_strides.seqlen + d] = Element(sO[m * kHeadDim + d] / row_sum[m]);
    }
  }
}

int64_t scratch_floats(const Params&) { return 0; }

template <int kHeadDim>
cudaError_t launch_head_dim(const Params& params, cudaStream_t stream) {
  const dim3 grid(params.batch * params.num_heads, ceil_div(params.seqlen, kBlockM));
  const size_t smem_bytes =
      sizeof(Accumulator) * (kBlockM * kHeadDim + kBlockM * kBlockN + 3 * kBlockM) +
      sizeof(Element) * (kBlockM * kHeadDim + 2 * kBlockN * kHeadDim);
  return launch_kernel(attention_kernel<kHeadDim>, grid, kThreads, smem_bytes, stream,
                       static_cast<const Element*>(params.q), static_cast<const Element*>(params.k),
                       static_cast<const Element*>(params.v), static_cast<Element*>(params.o),
                       params.q_strides, params.k_strides, params.v_strides, params.o_strides,
                       params.seqlen, params.num_heads, params.softmax_scale, params.is_causal);
}

cudaError_t launch(const Params& params, cudaStream_t stream) {
  switch (params.head_dim) {
    case 32:
      return launch_head_dim<32>(params, stream);
    case 64:
      return launch_head_dim<64>(params, stream);
    case 128:
      return launch_head_dim<128>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace attention::ATTENTION_VERSION
