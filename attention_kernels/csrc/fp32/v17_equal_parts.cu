// v17 - split the work into equal parts
//
// Change: the tiles of all heads and query blocks form one sequence, which is cut into equal parts,
//         one per block: as many as the device runs at once. Where a cut falls within the keys of a
//         query block, each part stores its O before the division, and the statistics, in scratch;
//         a second kernel joins them in the order of the keys. It is launched early and waits for
//         the first.
// Why:    under a causal mask the longest block has twice the average work. At GPT-2's batch of 1
//         it alone sets the time while other multiprocessors idle; and short sequences have fewer
//         query blocks than there are multiprocessors.
// Cost:   a second launch, and up to two parts per block in scratch. A row's rounding depends on
//         where it is cut: on the device, the batch and seqlen. head_dim 128 takes 72 KB of shared
//         memory, as in v16, more than sm_75 has. There a dozen registers spill, though not in the
//         inner loops, and v15 is faster.
// Tile:   kBlockM x kBlockN = 64 x 64, block (32, 2)
// Layout: strided
// Flags:  --use_fast_math
// Expect: at batch 1 and long sequences, nearly the rate that v16 reaches with many heads. With 12
//         heads and 512 keys a part is one tile: loading it, the launches and the join take as long
//         as its arithmetic. Up to 256 keys, 2 warps take longer for a tile of 64 rows than v15's 4
//         warps for one of 32, so v15 is faster. With 64 keys nothing is cut, and v16 is just as
//         fast.

#include <cuda_pipeline.h>

#include "common.cuh"
#include "ptx.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kThreadM = 8;
constexpr int kLanesM = 4;
constexpr int kLanesN = 8;
constexpr int kWarps = 2;
constexpr int kThreads = kLanesM * kLanesN * kWarps;
constexpr int kSlice = 4 * kLanesN;  // keys whose P is in shared memory at a time
constexpr int kBlockM = kThreadM * kLanesM * kWarps;
constexpr int kJoinThreads = 128;

// Accesses row[d] to row[d + 3]. The row is aligned to 16 bytes, and d is a multiple of 4.
inline __device__ float4 load4(const float* row, unsigned d) {
  return reinterpret_cast<const float4*>(row)[d / 4];
}

inline __device__ void store4(float* row, unsigned d, float4 x) {
  reinterpret_cast<float4*>(row)[d / 4] = x;
}

// The same with an array of floats.
inline __device__ void load_columns(float* x, const float* row, unsigned d) {
  const float4 x4 = load4(row, d);
  x[0] = x4.x;
  x[1] = x4.y;
  x[2] = x4.z;
  x[3] = x4.w;
}

inline __device__ void store_columns(float* row, unsigned d, const float* x) {
  store4(row, d, make_float4(x[0], x[1], x[2], x[3]));
}

// Column d of row n of Q and K is stored at d ^ swizzle(n). The 4 adjacent rows of a thread share
// a swizzle; 8 neighbouring threads' differ, so their float4s cover all 32 banks.
inline __device__ unsigned swizzle(unsigned n) { return n / 4 % 8 * 4; }

// The same for P, whose rows span all 32 banks.
inline __device__ unsigned swizzle_p(unsigned m) { return m / kThreadM % 2 * 16; }

// Visits a thread's rows downwards in even columns and upwards in odd ones. Each multiply-add then
// shares a factor with the one before it, which need not be read again.
inline __device__ constexpr int there_and_back(int step, int column) {
  return column % 2 == 0 ? step : kThreadM - 1 - step;
}

// Starts copying kRows rows to shared memory. Rows from valid_rows on are past the end and become
// zero.
template <int kRows, int kHeadDim>
inline __device__ void copy_tile(float* s_tile, const float* g_tile, int64_t g_stride,
                                 int valid_rows, bool swizzled) {
  constexpr int kRowsAtOnce = 4 * kThreads / kHeadDim;
  static_assert(kRows % kRowsAtOnce == 0, "every thread copies as much");
  const unsigned thread = threadIdx.y * 32 + threadIdx.x;
  const int r = 4 * thread / kHeadDim;
  const int d = 4 * thread % kHeadDim;
  const float* from = g_tile + r * g_stride + d;
#pragma unroll 8
  for (int i = 0; i < kRows; i += kRowsAtOnce) {
    const bool is_valid = r + i < valid_rows;  // if not, zero-fill; the address must be aligned
    __pipeline_memcpy_async(s_tile + (r + i) * kHeadDim + (swizzled ? d ^ swizzle(r + i) : d),
                            is_valid ? from : g_tile, sizeof(float4),
                            is_valid ? 0 : sizeof(float4));
    from += kRowsAtOnce * g_stride;
  }
}

// The work as a sequence of units, kBlockM queries by kBlockM keys, by head, query block, keys.
struct Work {
  int m_blocks;
  int per_head;
  int parts;
  int longer;  // the first `longer` parts have one unit more
  int64_t per_part;
  bool is_causal;

  Work(int heads, int seqlen, int block_m, int most_parts, bool is_causal_)
      : m_blocks(ceil_div(seqlen, block_m)), is_causal(is_causal_) {
    per_head = first_of_rows(m_blocks);
    const int64_t all = int64_t{heads} * per_head;
    parts = static_cast<int>(all < most_parts ? all : most_parts);
    longer = static_cast<int>(all % parts);
    per_part = all / parts;
  }
  // Both count units within a head.
  __host__ __device__ int first_of_rows(int m_block) const {
    return is_causal ? m_block * (m_block + 1) / 2 : m_block * m_blocks;
  }
  __device__ int rows_of(int unit) const {
    if (!is_causal) return unit / m_blocks;
    int m_block = static_cast<int>(sqrtf(2.0f * unit));  // may be off by one
    while (first_of_rows(m_block) > unit) --m_block;
    while (first_of_rows(m_block + 1) <= unit) ++m_block;
    return m_block;
  }
  __device__ int64_t first_of_part(int part) const { return part * per_part + min(part, longer); }
};

// The result for kBlockM queries over a part of their keys, in scratch.
template <int kBlockM, int kHeadDim>
struct Partial {
  float o[kBlockM][kHeadDim];
  float row_max[kBlockM];
  float row_sum[kBlockM];
};

// Counts the keys of the tile at n_start that `row` sees. The causal mask is top-left aligned.
template <int kBlockN>
inline __device__ int visible_keys(int row, int n_start, int seqlen, bool is_causal) {
  return min(kBlockN, (is_causal ? min(row + 1, seqlen) : seqlen) - n_start);
}

// Reduces x over the kLanesN lanes that share a row; every lane gets the result.
inline __device__ float reduce_max(float x) {
  for (int offset : {1, 4, 8}) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, offset));
  }
  return x;
}

inline __device__ float reduce_sum(float x) {
  for (int offset : {1, 4, 8}) {
    x += __shfl_xor_sync(0xffffffff, x, offset);
  }
  return x;
}

// O += P V for a slice of keys. On the mask's diagonal, row m of the warp sees the keys up to m.
// For the others P is 0, but V may be anything: 0 * NaN is not 0.
template <int kHeadDim, bool kIsDiagonal>
inline __device__ void add_product(float (&rO)[kThreadM][kHeadDim / kLanesN], const float* s_p,
                                   const float* s_v, int thread_m, int thread_n) {
  constexpr int kColumns = kHeadDim / kLanesN;
#pragma unroll(kIsDiagonal || kHeadDim == 128 ? 1 : 2)
  for (int n = 0; n < kSlice; n += 4) {
    float rP[kThreadM][4];
    for (int i = 0; i < kThreadM; ++i) {
      const int m = kThreadM * thread_m + i;
      load_columns(rP[i], s_p + m * kSlice, n ^ swizzle_p(kThreadM * thread_m));
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float rV[kColumns];
      for (int c = 0; c < kColumns; c += 4) {
        load_columns(rV + c, s_v + (n + j) * kHeadDim, c * kLanesN + 4 * thread_n);
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int step = 0; step < kThreadM; ++step) {
          const int i = there_and_back(step, c);
          const bool visible = !kIsDiagonal || n + j <= kThreadM * thread_m + i;
          if (visible) rO[i][c] += rP[i][j] * rV[c];
        }
      }
    }
  }
}

template <int kBlockM, int kBlockN, int kHeadDim>
__global__ void __launch_bounds__(kThreads, kHeadDim == 128 ? 3 : 4)
    attention_kernel(const float* __restrict__ q, const float* __restrict__ k,
                     const float* __restrict__ v, float* __restrict__ o,
                     Partial<kBlockM, kHeadDim>* __restrict__ partials, Strides q_strides,
                     Strides k_strides, Strides v_strides, int seqlen, int num_heads,
                     float softmax_scale, bool is_causal, Work work) {
  static_assert(kBlockM == kThreadM * kLanesM * kWarps, "a thread has kThreadM rows");
  static_assert(kBlockN % kSlice == 0 && kSlice == kThreadM * kLanesM, "P has 32 x 32 elements");
  constexpr int kThreadN = kBlockN / kLanesN;   // columns of S per thread, in groups of four
  constexpr int kColumns = kHeadDim / kLanesN;  // columns of O, likewise
  // Lanes that differ only in bits 0, 2 and 3 share rows; those that differ only in bits 1 and 4
  // share columns. So a quarter of a warp covers 2 x 4 of the 4 x 8 lanes, half a warp 2 x 8.
  const int lane_id = threadIdx.x;
  const int thread_m = (lane_id >> 1 & 1) | (lane_id >> 4) << 1;
  const int thread_n = (lane_id & 1) | (lane_id >> 2 & 3) << 1;
  const int warp_m = threadIdx.y * kThreadM * kLanesM;  // this warp's first row
  const int m = warp_m + kThreadM * thread_m;           // this thread's first row
  ATTENTION_DYNAMIC_SHARED(float, smem);
  float* sQ = smem;
  float* sK = sQ + kBlockM * kHeadDim;
  float* sV = sK + kBlockN * kHeadDim;
  float* sP = sV + kBlockN * kHeadDim;

  ptx::allow_next();
  int64_t unit = work.first_of_part(blockIdx.x);
  int left = static_cast<int>(work.first_of_part(blockIdx.x + 1) - unit);
  while (left > 0) {
    const int heads = static_cast<int>(unit / work.per_head);
    const int in_head = static_cast<int>(unit % work.per_head);
    const int m_block = work.rows_of(in_head);
    const int m_start = m_block * kBlockM;
    const int valid_rows = seqlen - m_start;
    const int batch = heads / num_heads;
    const int head = heads % num_heads;
    const float* gQ =
        q + batch * q_strides.batch + head * q_strides.head + m_start * q_strides.seqlen;
    const float* gK = k + batch * k_strides.batch + head * k_strides.head;
    const float* gV = v + batch * v_strides.batch + head * v_strides.head;

    float row_max[kThreadM];
    float row_sum[kThreadM];
    float rO[kThreadM][kColumns] = {};
    for (int i = 0; i < kThreadM; ++i) {
      row_max[i] = -INFINITY;
      row_sum[i] = 0.0f;
    }

    const int units = is_causal ? m_block + 1 : work.m_blocks;
    const int first = in_head - work.first_of_rows(m_block);
    const int count = min(left, units - first);
    const bool is_whole = count == units;
    unit += count;
    left -= count;
    const int n_first = first * kBlockM;
    const int n_end = min(n_first + count * kBlockM, seqlen);
    copy_tile<kBlockM, kHeadDim>(sQ, gQ, q_strides.seqlen, valid_rows, true);
    copy_tile<kBlockN, kHeadDim>(sK, gK + n_first * k_strides.seqlen, k_strides.seqlen,
                                 n_end - n_first, true);
    for (int n_start = n_first; n_start < n_end; n_start += kBlockN) {
      __pipeline_commit();
      __pipeline_wait_prior(0);
      __syncthreads();
      copy_tile<kBlockN, kHeadDim>(sV, gV + n_start * v_strides.seqlen, v_strides.seqlen,
                                   n_end - n_start, false);

      // S = softmax_scale * Q K^T
      float rS[kThreadM][kThreadN] = {};
#pragma unroll 1
      for (int d = 0; d < kHeadDim; d += 4) {
        float rQ[kThreadM][4];
        for (int i = 0; i < kThreadM; ++i) {
          load_columns(rQ[i], sQ + (m + i) * kHeadDim, d ^ swizzle(m + i / 4 * 4));
        }
        float rK[kThreadN][4];
        for (int j = 0; j < kThreadN; ++j) {
          const int n = j / 4 * kSlice + 4 * thread_n + j % 4;
          load_columns(rK[j], sK + n * kHeadDim, d ^ swizzle(4 * thread_n));
        }
        for (int e = 0; e < 4; ++e) {
          for (int j = 0; j < kThreadN; ++j) {
            for (int step = 0; step < kThreadM; ++step) {
              const int i = there_and_back(step, j);
              rS[i][j] += rQ[i][e] * rK[j][e];
            }
          }
        }
      }
      __pipeline_commit();
      __pipeline_wait_prior(0);
      __syncthreads();
      const int n_next = n_start + kBlockN;
      if (n_next < n_end) {
        copy_tile<kBlockN, kHeadDim>(sK, gK + n_next * k_strides.seqlen, k_strides.seqlen,
                                     n_end - n_next, true);
      }

      // P = exp(S - row_max), and the running row statistics
      for (int i = 0; i < kThreadM; ++i) {
        for (int j = 0; j < kThreadN; ++j) rS[i][j] *= softmax_scale;
      }
      if (visible_keys<kBlockN>(m_start + warp_m, n_start, seqlen, is_causal) < kBlockN) {
        for (int i = 0; i < kThreadM; ++i) {
          const int visible = visible_keys<kBlockN>(m_start + m + i, n_start, seqlen, is_causal);
          for (int j = 0; j < kThreadN; ++j) {
            const int n = j / 4 * kSlice + 4 * thread_n + j % 4;
            if (n >= visible) rS[i][j] = -INFINITY;
          }
        }
      }
      for (int i = 0; i < kThreadM; ++i) {
        float tile_max = -INFINITY;
        for (int j = 0; j < kThreadN; ++j) {
          tile_max = fmaxf(tile_max, rS[i][j]);
        }
        const float new_max = fmaxf(row_max[i], reduce_max(tile_max));
        const float row_scale = expf(row_max[i] - new_max);
        row_max[i] = new_max;
        row_sum[i] = row_scale * row_sum[i];  // this thread's partial sum
        for (int j = 0; j < kThreadN; ++j) {
          rS[i][j] = expf(rS[i][j] - new_max);
          row_sum[i] += rS[i][j];
        }
        for (int c = 0; c < kColumns; ++c) {
          rO[i][c] *= row_scale;
        }
      }

      // O += P V, one slice of keys at a time. The warp sees no key of a slice past its diagonal.
#pragma unroll
      for (int slice = 0; slice < kBlockN; slice += kSlice) {
        const int past_diagonal = is_causal ? n_start + slice - m_start - warp_m : -1;
        if (past_diagonal > 0) break;
        __syncwarp();
        for (int i = 0; i < kThreadM; ++i) {
          store_columns(sP + (m + i) * kSlice, 4 * thread_n ^ swizzle_p(m),
                        rS[i] + slice / kLanesN);
        }
        __syncwarp();
        const float* s_v = sV + slice * kHeadDim;
        if (past_diagonal < 0) {
          add_product<kHeadDim, false>(rO, sP + warp_m * kSlice, s_v, thread_m, thread_n);
        } else {
          add_product<kHeadDim, true>(rO, sP + warp_m * kSlice, s_v, thread_m, thread_n);
        }
      }
    }

    const int row_stride = num_heads * kHeadDim;
    const int64_t offset = (int64_t{batch} * seqlen * num_heads + head) * kHeadDim;
    float* gO = o + offset + int64_t{m_start} * row_stride;
    Partial<kBlockM, kHeadDim>& partial = partials[2 * blockIdx.x + (first == 0)];
    for (int i = 0; i < kThreadM; ++i) {
      row_sum[i] = reduce_sum(row_sum[i]);
      if (m + i < valid_rows) {
        float* row = is_whole ? gO + (m + i) * row_stride : partial.o[m + i];
        const float divisor = is_whole ? row_sum[i] : 1.0f;
        for (int c = 0; c < kColumns; c += 4) {
          float out[4];
          for (int w = 0; w < 4; ++w) {
            out[w] = rO[i][c + w] / divisor;
          }
          store_columns(row, c * kLanesN + 4 * thread_n, out);
        }
        if (!is_whole && thread_n == 0) {
          partial.row_max[m + i] = row_max[i];
          partial.row_sum[m + i] = row_sum[i];
        }
      }
    }
  }
}

// Joins the parts of the query block that the cut before part blockIdx.x + 1 divides, unless an
// earlier cut divides it too. A thread has four columns of a row.
template <int kBlockM, int kHeadDim>
__global__ void __launch_bounds__(kJoinThreads)
    join_kernel(const Partial<kBlockM, kHeadDim>* __restrict__ partials, float* __restrict__ o,
                int seqlen, int num_heads, Work work) {
  const int64_t cut = work.first_of_part(blockIdx.x + 1);
  const int heads = static_cast<int>(cut / work.per_head);
  const int in_head = static_cast<int>(cut % work.per_head);
  const int m_block = work.rows_of(in_head);
  const int64_t first = cut - in_head + work.first_of_rows(m_block);
  const int64_t end = cut - in_head + work.first_of_rows(m_block + 1);
  const int thread = blockIdx.y * kJoinThreads + threadIdx.x;
  const int m = thread / (kHeadDim / 4);
  const int d = thread % (kHeadDim / 4) * 4;
  const int row = m_block * kBlockM + m;
  const int first_part = blockIdx.x;
  const bool is_cut = first >= work.first_of_part(first_part) && first < cut && row < seqlen;
  if (!is_cut && blockIdx.x > 0) return;  // one must wait, or this kernel might end first
  ptx::wait_for_previous();
  if (!is_cut) return;
  int end_part = first_part + 2;
  while (work.first_of_part(end_part) < end) ++end_part;

  float row_max = -INFINITY;
  float row_sum = 0.0f;
  float total[4] = {};
#pragma unroll 4
  for (int part = first_part; part < end_part; ++part) {
    const auto& partial = partials[2 * part + (part == first_part)];
    float columns[4];
    load_columns(columns, partial.o[m], d);
    const float new_max = fmaxf(row_max, partial.row_max[m]);
    const float row_scale = expf(row_max - new_max);
    const float part_scale = expf(partial.row_max[m] - new_max);
    row_max = new_max;
    row_sum = row_scale * row_sum + part_scale * partial.row_sum[m];
    for (int w = 0; w < 4; ++w) {
      total[w] = row_scale * total[w] + part_scale * columns[w];
    }
  }
  for (int w = 0; w < 4; ++w) {
    total[w] /= row_sum;
  }
  const int64_t at = int64_t{heads / num_heads} * seqlen + row;
  store_columns(o + (at * num_heads + heads % num_heads) * kHeadDim, d, total);
}

// Makes as many parts as the device runs blocks at once, but none empty. If the device does not
// answer here, the launch reports it.
template <int kBlockM>
inline Work work_of(const Params& params) {
  int device = 0, multiprocessors = 1;
  (void)cudaGetDevice(&device);
  (void)cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const int resident = multiprocessors * (params.head_dim == 128 ? 3 : 4);
  return Work(params.batch * params.num_heads, params.seqlen, kBlockM, resident, params.is_causal);
}

int64_t scratch_floats(const Params& params) {
  return int64_t{2} * work_of<kBlockM>(params).parts * kBlockM * (params.head_dim + 2);
}

template <int kHeadDim>
cudaError_t launch_head_dim(const Params& params, cudaStream_t stream) {
  constexpr int kBlockN = kHeadDim == 128 ? 32 : 64;
  using Part = Partial<kBlockM, kHeadDim>;
  const Work work = work_of<kBlockM>(params);
  Part* const partials = reinterpret_cast<Part*>(params.scratch);
  const size_t smem_bytes = sizeof(float) * (kBlockM * kHeadDim + kBlockN * kHeadDim +
                                             kBlockN * kHeadDim + kBlockM * kSlice);
  const cudaError_t error = launch_kernel(
      attention_kernel<kBlockM, kBlockN, kHeadDim>, dim3(work.parts), dim3(32, kWarps), smem_bytes,
      stream, static_cast<const float*>(params.q), static_cast<const float*>(params.k),
      static_cast<const float*>(params.v), static_cast<float*>(params.o), partials,
      params.q_strides, params.k_strides, params.v_strides, params.seqlen, params.num_heads,
      params.softmax_scale, params.is_causal, work);
  if (error != cudaSuccess || work.m_blocks == 1) return error;  // nothing was cut
  return launch_early(join_kernel<kBlockM, kHeadDim>,
                      dim3(work.parts - 1, kBlockM * kHeadDim / 4 / kJoinThreads), 1,
                      dim3(kJoinThreads), 0, stream, partials, static_cast<float*>(params.o),
                      params.seqlen, params.num_heads, work);
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
