// v10 - maxima of three numbers
//
// From:   v08
// Change: a row's largest score is found by comparing integers, for which Hopper has an instruction that
//         takes three. Integers are in the order of the scores unless all are negative, and then in the
//         opposite one: a warp with such a row searches again.
// Why:    beside products, a maximum takes four cycles per warp and scheduler, a multiplication two.
// Cost:   the second search. It takes no longer than the one of v08.
// Tile:   kBlockM x kBlockN = 192 x 128, block 512; 128 x 128, block 384 for head_dim 128
// Layout: strided
// Takes:  float16 bfloat16, head_dim 64 128
// Needs:  sm_90a
// Flags:  --use_fast_math
// Expect: by a trial, 0.93 times the time of v08 at head_dim 128 for long sequences, 0.96 at 64; the same
//         with 1,024 rows. The branch also keeps ptxas from waiting for P V before the search, see v09.

// V must be finite, as for most tensor-core kernels: where a query does not see a key of its tile,
// P is 0, but the product still adds 0 * V to the sum.

#include <type_traits>

#include "element.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace attention::ATTENTION_VERSION {

constexpr int kBlockN = 128;
constexpr int kStages = 2;            // tiles in shared memory
constexpr int kScores = kBlockN / 2;  // elements of S per thread
constexpr int kColumns = 64;          // a tile is in blocks of this many columns: rows of 128 bytes
constexpr int kRowBytes = kColumns * sizeof(Element);
constexpr int kSwizzleBytes = 8 * kRowBytes;  // the swizzle repeats after 8 rows
constexpr int kStep = 16;                     // columns of A, rows of B, in one wgmma
constexpr int kSteps = kBlockN / kStep;       // of P V
constexpr bool kIsBfloat16 = std::is_same_v<Element, __nv_bfloat16>;

// A block has a warpgroup that copies and kConsumers that compute, with 64 queries each. The
// registers are at most the multiprocessor's 65,536.
template <int kHeadDim>
constexpr int kConsumers = kHeadDim > 64 ? 2 : 3;
template <int kHeadDim>
constexpr int kProducerRegisters = kHeadDim > 64 ? 40 : 32;
template <int kHeadDim>
constexpr int kConsumerRegisters = kHeadDim > 64 ? 232 : 160;
template <int kHeadDim>
constexpr int kThreads = 128 * (1 + kConsumers<kHeadDim>);
template <int kHeadDim>
constexpr int kBlockM = 64 * kConsumers<kHeadDim>;

template <int kHeadDim, int kRows>
constexpr int kTileBytes = kRows * kHeadDim * sizeof(Element);

// Rounds x and y to a pair of Elements.
inline __device__ unsigned pack(float x, float y) {
  if constexpr (kIsBfloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    return *reinterpret_cast<const unsigned*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(x, y);
    return *reinterpret_cast<const unsigned*>(&pair);
  }
}

// Starts to copy rows to shared memory: kHeadDim / kColumns blocks of kRows x kColumns, in which
// the 16-byte chunks of row r are permuted by r % 8. Rows past the end are zero.
template <int kHeadDim, int kRows>
inline __device__ void copy_tile(unsigned char* s_tile, const TensorMap& map, int row, int batch,
                                 int head, ptx::Barrier* barrier) {
#pragma unroll
  for (int d = 0; d < kHeadDim; d += kColumns) {
    ptx::load_tile(s_tile + d / kColumns * kRows * kRowBytes, map, d, head, row, batch, barrier);
  }
}

// Tells that this warp has read a tile.
inline __device__ void arrive(ptx::Barrier* barrier) {
  if (threadIdx.x % 32 == 0) ptx::barrier_arrive(barrier);
}

// Consumers issue their products in turn: one waits until another has passed the turn to it.
inline __device__ void wait_for_turn(int warpgroup) { ptx::named_barrier_sync(4 + warpgroup, 256); }
inline __device__ void pass_turn(int warpgroup) { ptx::named_barrier_arrive(4 + warpgroup, 256); }

// Changes the sign of a warpgroup's rows of Q.
template <int kHeadDim>
inline __device__ void negate(unsigned char* sQ_warpgroup) {
#pragma unroll 1
  for (int i = threadIdx.x % 128; i < kTileBytes<kHeadDim, 64> / 4; i += 128) {
    constexpr int kBlockWords = 64 * kRowBytes / 4;
    unsigned* words = reinterpret_cast<unsigned*>(sQ_warpgroup) +
                      i / kBlockWords * (kBlockM<kHeadDim> * kRowBytes / 4);
    words[i % kBlockWords] ^= 0x80008000;
  }
  ptx::proxy_fence();
}

// In a warpgroup, lane l of warp w holds of S and O rows 16 w + l / 4 (r = 0) and 8 further on
// (r = 1), at columns 8 j + 2 (l % 4) and the next: elements 4 j + 2 r and 4 j + 2 r + 1.

// S = Q K^T, both with kHeadDim columns
template <int kHeadDim>
inline __device__ void multiply_qk(float (&rS)[kScores], const unsigned char* sQ,
                                   const unsigned char* sK) {
  const uint64_t a = ptx::matrix_descriptor(sQ);
  const uint64_t b = ptx::matrix_descriptor(sK);
  ptx::multiply_fence(rS);
#pragma unroll
  for (int d = 0; d < kHeadDim; d += kStep) {
    const int block = d / kColumns, at = d % kColumns * sizeof(Element);
    ptx::multiply<kIsBfloat16>(rS, ptx::advance(a, block * kBlockM<kHeadDim> * kRowBytes + at),
                               ptx::advance(b, block * kBlockN * kRowBytes + at), d > 0);
  }
  ptx::multiply_commit();
}

// O += P V, where V is transposed: wgmma's B has columns in its rows, as K has.
template <int kHeadDim>
inline __device__ void multiply_pv(float (&rO)[kHeadDim / 2], unsigned (&rP)[kSteps][4],
                                   const unsigned char* sV) {
  const uint64_t b = ptx::matrix_descriptor(sV, kBlockN * kRowBytes);
  ptx::multiply_fence(rO, rP);
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
    ptx::multiply<kIsBfloat16, true>(rO, rP[j], ptx::advance(b, j * kStep * kRowBytes));
  }
  ptx::multiply_commit();
}

// Hides keys that a query does not see. n is the first column of this lane, m its first row.
inline __device__ void mask(float (&rS)[kScores], int n, int m, int seqlen, bool is_causal) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const int visible = is_causal ? min(m + i % 4 / 2 * 8 + 1, seqlen) : seqlen;
    if (n + i / 4 * 8 + i % 2 >= visible) rS[i] = -INFINITY;
  }
}

struct Statistics {
  float row_max[2] = {-INFINITY, -INFINITY};  // score_scale times the largest score
  float row_sum[2] = {};                      // of this lane's P
};

// Replaces S by P = exp2(score_scale * S - row_max). Returns what O must be multiplied by. The
// first tile has a key for every query, so row_max is finite from then on.
inline __device__ float2 softmax(float (&rS)[kScores], Statistics& rows, float score_scale) {
  float row_scale[2], largest[2];
  largest_of_rows(largest, rS);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float new_max = fmaxf(score_scale * largest[r], rows.row_max[r]);
    row_scale[r] = exp2f(rows.row_max[r] - new_max);
    rows.row_max[r] = new_max;
    rows.row_sum[r] *= row_scale[r];
#pragma unroll
    for (int i = 2 * r; i < kScores; i += 4) {
      rS[i] = exp2f(fmaf(score_scale, rS[i], -new_max));
      rS[i + 1] = exp2f(fmaf(score_scale, rS[i + 1], -new_max));
      rows.row_sum[r] += rS[i] + rS[i + 1];
    }
  }
  return make_float2(row_scale[0], row_scale[1]);
}

// An accumulator's elements are in the order of wgmma's A operand.
inline __device__ void round_p(unsigned (&rP)[kSteps][4], const float (&rS)[kScores]) {
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i) rP[i / 4][i % 4] = pack(rS[2 * i], rS[2 * i + 1]);
}

template <int kHeadDim>
inline __device__ void rescale(float (&rO)[kHeadDim / 2], float2 row_scale) {
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) rO[i] *= i % 4 < 2 ? row_scale.x : row_scale.y;
}

// Divides O by row_sum and stores it. m is the lane's first row.
template <int kHeadDim>
inline __device__ void store(Element* gO, int64_t g_stride, const float (&rO)[kHeadDim / 2],
                             const Statistics& rows, int m, int seqlen) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float row_sum = rows.row_sum[r];
    row_sum += __shfl_xor_sync(0xffffffff, row_sum, 1);
    row_sum += __shfl_xor_sync(0xffffffff, row_sum, 2);
    if (m + 8 * r >= seqlen) continue;
    unsigned* g_row = reinterpret_cast<unsigned*>(gO + (m + 8 * r) * g_stride) + threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
      g_row[4 * j] = pack(rO[4 * j + 2 * r] / row_sum, rO[4 * j + 2 * r + 1] / row_sum);
    }
  }
}

// kBlockM queries of one head, or nothing.
struct Work {
  int head;  // of all batch entries
  int m_start;
  int tiles;  // of the keys that these queries see

  __device__ explicit operator bool() const { return tiles > 0; }
};

// Returns the i-th work of this block. The last queries have the most keys, so they go first; of
// each round of work, blocks with an early one get a late one in the next.
template <int kHeadDim>
inline __device__ Work work_of(int i, int heads, int seqlen, bool is_causal) {
  const int m_blocks = (seqlen + kBlockM<kHeadDim> - 1) / kBlockM<kHeadDim>;
  const int at = i * gridDim.x + (i % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  if (at >= m_blocks * heads) return {0, 0, 0};
  const int m_start = (m_blocks - 1 - at / heads) * kBlockM<kHeadDim>;
  const int n_end = is_causal ? min(m_start + kBlockM<kHeadDim>, seqlen) : seqlen;
  return {at % heads, m_start, (n_end + kBlockN - 1) / kBlockN};
}

template <int kHeadDim>
constexpr int kSmemBytes =
    kTileBytes<kHeadDim, kBlockM<kHeadDim>> + 2 * kStages * kTileBytes<kHeadDim, kBlockN>;

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads<kHeadDim>)
    attention_kernel(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                     const __grid_constant__ TensorMap v, Element* __restrict__ o,
                     Strides o_strides, int heads, int seqlen, int num_heads, float softmax_scale,
                     bool is_causal) {
  ATTENTION_ALIGNED_SHARED(unsigned char, sQ, kSwizzleBytes);
  unsigned char* sK = sQ + kTileBytes<kHeadDim, kBlockM<kHeadDim>>;
  unsigned char* sV = sK + kStages * kTileBytes<kHeadDim, kBlockN>;
  __shared__ ptx::Barrier k_full[kStages], v_full[kStages];  // Q arrives with the first tile of K
  __shared__ ptx::Barrier k_empty[kStages], v_empty[kStages], q_empty;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::barrier_init(&k_full[stage], 1);
      ptx::barrier_init(&v_full[stage], 1);
      ptx::barrier_init(&k_empty[stage], 4 * kConsumers<kHeadDim>);  // every warp arrives
      ptx::barrier_init(&v_empty[stage], 4 * kConsumers<kHeadDim>);
    }
    ptx::barrier_init(&q_empty, 4 * kConsumers<kHeadDim>);
    ptx::barrier_init_fence();
  }
  __syncthreads();

  constexpr int kBytes = kTileBytes<kHeadDim, kBlockN>;
  if (threadIdx.x < 128) {
    ptx::lower_registers<kProducerRegisters<kHeadDim>>();
    if (threadIdx.x != 0) return;
    int count = 0;  // of tiles so far
    for (int i = 0; Work work = work_of<kHeadDim>(i, heads, seqlen, is_causal); ++i) {
      const int batch = work.head / num_heads;
      const int head = work.head % num_heads;
      for (int tile = 0; tile < work.tiles; ++tile, ++count) {
        const int stage = count % kStages;
        const int parity = count / kStages % 2;
        ptx::barrier_wait(&k_empty[stage], parity ^ 1);  // at first, the phase before is complete
        ptx::barrier_expect(&k_full[stage],
                            kBytes + (tile == 0 ? kTileBytes<kHeadDim, kBlockM<kHeadDim>> : 0));
        copy_tile<kHeadDim, kBlockN>(sK + stage * kBytes, k, tile * kBlockN, batch, head,
                                     &k_full[stage]);
        if (tile == 0) {
          ptx::barrier_wait(&q_empty, (i + 1) % 2);
          copy_tile<kHeadDim, kBlockM<kHeadDim>>(sQ, q, work.m_start, batch, head, &k_full[stage]);
        }
        ptx::barrier_wait(&v_empty[stage], parity ^ 1);
        ptx::barrier_expect(&v_full[stage], kBytes);
        copy_tile<kHeadDim, kBlockN>(sV + stage * kBytes, v, tile * kBlockN, batch, head,
                                     &v_full[stage]);
      }
    }
    return;
  }
  ptx::raise_registers<kConsumerRegisters<kHeadDim>>();

  const int warpgroup = threadIdx.x / 128 - 1;
  const int n = threadIdx.x % 4 * 2;
  unsigned char* sQ_warpgroup = sQ + 64 * warpgroup * kRowBytes;
  const float score_scale = fmaxf(fabsf(softmax_scale) * 1.4426950408889634f, 1e-37f);
  constexpr int kLast = kConsumers<kHeadDim> - 1;
  if (warpgroup == kLast) pass_turn(0);
  float rS[kScores];
  unsigned rP[kSteps][4];
  float rO[kHeadDim / 2];

  int count = 0;  // of tiles before the work
  for (int i = 0; Work work = work_of<kHeadDim>(i, heads, seqlen, is_causal); ++i) {
    const int tiles = work.tiles;
    // Nobody waits for the turn after the last warpgroup's last tile.
    const bool is_last = warpgroup == kLast && !work_of<kHeadDim>(i + 1, heads, seqlen, is_causal);
    const int m_first = work.m_start + 64 * warpgroup;
    const int m = m_first + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const int n_seen = is_causal ? m_first + 1 : seqlen;  // every query sees the keys before it

    // Q takes the scale's sign; the scale is then positive, and row_max is of the largest score.
    if (softmax_scale < 0.0f) {
      ptx::barrier_wait(&k_full[count % kStages], count / kStages % 2);
      negate<kHeadDim>(sQ_warpgroup);
      ptx::named_barrier_sync(1 + warpgroup, 128);
    }
    Statistics rows;
    const auto start_qk = [&](int tile) {
      const int stage = (count + tile) % kStages;
      ptx::barrier_wait(&k_full[stage], (count + tile) / kStages % 2);
      wait_for_turn(warpgroup);
      multiply_qk<kHeadDim>(rS, sQ_warpgroup, sK + stage * kBytes);
    };
    const auto start_pv = [&](int tile) {
      const int stage = (count + tile) % kStages;
      ptx::barrier_wait(&v_full[stage], (count + tile) / kStages % 2);
      multiply_pv<kHeadDim>(rO, rP, sV + stage * kBytes);
    };
    const auto end_turn = [&](int tile) {
      if (tile + 1 < tiles || !is_last) pass_turn((warpgroup + 1) % kConsumers<kHeadDim>);
    };
    const auto use_s = [&](int tile) {
      const int n_start = tile * kBlockN;
      arrive(&k_empty[(count + tile) % kStages]);
      if (tile + 1 == tiles) arrive(&q_empty);
      if (n_start + kBlockN > n_seen) mask(rS, n_start + n, m, seqlen, is_causal);
      return softmax(rS, rows, score_scale);
    };

    start_qk(0);
    end_turn(0);
    ptx::multiply_wait<0>(rS);
    use_s(0);
    round_p(rP, rS);
#pragma unroll
    for (float& x : rO) x = 0.0f;
    for (int tile = 1; tile < tiles; ++tile) {
      start_qk(tile);
      start_pv(tile - 1);
      end_turn(tile);
      ptx::multiply_wait<1>(rS);
      const float2 row_scale = use_s(tile);
      ptx::multiply_wait<0>(rO);
      arrive(&v_empty[(count + tile - 1) % kStages]);
      rescale<kHeadDim>(rO, row_scale);
      round_p(rP, rS);
    }
    start_pv(tiles - 1);
    ptx::multiply_wait<0>(rO);
    arrive(&v_empty[(count + tiles - 1) % kStages]);
    Element* gO =
        o + work.head / num_heads * o_strides.batch + work.head % num_heads * o_strides.head;
    store<kHeadDim>(gO, o_strides.seqlen, rO, rows, m, seqlen);
    count += tiles;
  }
}

int64_t scratch_floats(const Params&) { return 0; }

// Describes q, k or v, of which a copy takes `rows` rows and kColumns columns. The stride of a
// dimension of size 1 does not matter and may be anything, so it gets a valid one.
cudaError_t make_map(TensorMap* map, const void* x, const Strides& strides, int rows,
                     const Params& params) {
  const int64_t sizes[4] = {params.head_dim, params.num_heads, params.seqlen, params.batch};
  const int64_t given[3] = {strides.head, strides.seqlen, strides.batch};
  int64_t valid[3];
  for (int i = 0; i < 3; ++i) valid[i] = sizes[i + 1] > 1 ? given[i] : params.head_dim;
  return make_tensor_map(map, static_cast<const Element*>(x), sizes, valid, {kColumns, 1, rows, 1});
}

template <int kHeadDim>
cudaError_t launch_head_dim(const Params& params, cudaStream_t stream) {
  TensorMap q, k, v;
  cudaError_t error = make_map(&q, params.q, params.q_strides, kBlockM<kHeadDim>, params);
  if (error == cudaSuccess) error = make_map(&k, params.k, params.k_strides, kBlockN, params);
  if (error == cudaSuccess) error = make_map(&v, params.v, params.v_strides, kBlockN, params);
  if (error != cudaSuccess) return error;
  int device = 0, multiprocessors = 0;
  error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const int heads = params.batch * params.num_heads;
  const int64_t works = int64_t{heads} * ceil_div(params.seqlen, kBlockM<kHeadDim>);
  const int grid = static_cast<int>(works < multiprocessors ? works : multiprocessors);
  return launch_kernel(attention_kernel<kHeadDim>, dim3(grid), dim3(kThreads<kHeadDim>),
                       kSmemBytes<kHeadDim>, stream, q, k, v, static_cast<Element*>(params.o),
                       params.o_strides, heads, params.seqlen, params.num_heads,
                       params.softmax_scale, params.is_causal);
}

cudaError_t launch(const Params& params, cudaStream_t stream) {
  switch (params.head_dim) {
    case 64:
      return launch_head_dim<64>(params, stream);
    case 128:
      return launch_head_dim<128>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace attention::ATTENTION_VERSION
