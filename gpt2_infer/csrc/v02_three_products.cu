// v02 - three products of float16 numbers on tensor cores
//
// Change: each factor is the sum of two float16 numbers, hi + lo, and x W is the sum of lo hi,
//         hi lo and hi hi; lo lo is less than a rounding. The columns of W are scaled by powers of
//         two and split once, when they are packed; the rows of x as each slab is copied to shared
//         memory, with a scale per row and slab.
// Why:    tensor cores compute three such products three times as fast as the other cores compute
//         one in float32, and hi + lo has 22 bits.
// Cost:   a second, packed copy of the weights. Every block with the same rows of x splits them
//         again. A number that is less than 2^-39 times the largest of its row and slab, or of its
//         column of W, loses bits.
// Tile:   32 x 16 or 32 x 32 per warp; a block's 4 warps are side by side; 64 k per slab
// Layout: contiguous
// Role:   struct
// Needs:  sm_80
// Precision: 3xfp16
// Flags:  (none)
// Expect: latency is the bottleneck: of a slab, which a block loads, splits and multiplies in turn.
//         Tiles of 64 rows need half as many copies of W, but were slower on sm_90.
//
// Half a slab's sums are new accumulators: tensor cores round towards zero, so a long chain would
// drift. They are multiplied by the scale of their row as they are added to the tile's sums, in
// float32.

#include <cuda_fp16.h>

#include "product.cuh"

namespace attention {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlockK = 64;  // k per slab
constexpr int kChains = 2;   // chains of products per slab
constexpr int kSteps = kBlockK / kChains / 16;
constexpr int kRows = 2;      // fragments of 16 rows per warp
constexpr int kTop = 14;      // exponent to which a row's or a column's largest number is scaled
constexpr int kLeast = -112;  // the smallest exponent that is scaled for
constexpr int kMost = 127;
constexpr int kShift = 22;  // sums are 2^-22 times as large, so that few can overflow
constexpr float kSmaller = 0x1p-22f;
constexpr int kStrideX = 2 * kBlockK + 8;            // halves: hi, lo, padding
constexpr int kStripChunks = kBlockK / 16 * 2 * 32;  // 16-byte chunks of a slab of 16 columns of W
constexpr int kLanes = kBlockK / 4;                  // that have a row of x
constexpr int kRowsApart = kThreads / kLanes;

// A block has 32 rows and the columns of its warps, which are side by side. Each warp has kRows x
// kStrips fragments.
template <int kStrips_, int kStages_, int kResident_>
struct Tile {
  static constexpr int kStrips = kStrips_;
  static constexpr int kStages = kStages_;      // slabs of W in shared memory
  static constexpr int kResident = kResident_;  // blocks per multiprocessor
  static constexpr int kBlockM = 16 * kRows;
  static constexpr int kBlockN = 16 * kStrips * kWarps;
  static constexpr int kBlockK = attention::kBlockK;
  static constexpr int kThreads = attention::kThreads;
  static constexpr int kBytesW = kBlockN / 16 * kStripChunks * sizeof(uint4);
  static constexpr int kHalvesX = kBlockM * kStrideX;  // two slabs of x are in shared memory
  static constexpr int kBytesX = 2 * (sizeof(half) * kHalvesX + sizeof(float) * kBlockM);
  static constexpr int kSmemBytes = kStages * kBytesW + kBytesX;
  static constexpr int kEach = kBlockM / kRowsApart;  // rows of x per thread and slab
};

__device__ inline float power_of_two(int exponent) {
  return __uint_as_float(static_cast<unsigned>(exponent + 127) << 23);
}

// Splits x and y into hi + lo; a word holds a pair of halves.
__device__ inline void split(float x, float y, unsigned& hi, unsigned& lo) {
  const half2 high = __floats2half2_rn(x, y);
  const float2 back = __half22float2(high);
  const half2 low = __floats2half2_rn(x - back.x, y - back.y);
  hi = *reinterpret_cast<const unsigned*>(&high);
  lo = *reinterpret_cast<const unsigned*>(&low);
}

// A thread's part of the rows of x: four k of every kRowsApart-th row.
template <typename T>
struct Rows {
  const float* x;  // the first row's next four
  int64_t step;    // floats between rows
  int count;       // rows from the first on
  float4 values[T::kEach];

  static __device__ int row() { return threadIdx.x / kLanes; }
  static __device__ int k() { return threadIdx.x % kLanes * 4; }

  __device__ Rows(const ProductParams& p, int m0, int k0) {
    x = p.x + static_cast<int64_t>(m0 + row()) * p.k + k0 + k();
    step = static_cast<int64_t>(kRowsApart) * p.k;
    count = p.m - m0 - row();
  }

  // Loads a slab and moves on to the next, if there is one.
  __device__ void load(bool has_next) {
#pragma unroll
    for (int i = 0; i < T::kEach; ++i)
      values[i] = kRowsApart * i < count ? load4(x + i * step) : float4{0.0f, 0.0f, 0.0f, 0.0f};
    if (has_next) x += kBlockK;
  }

  // All lanes that have a row store its scale: a branch would keep the compiler from
  // mixing these instructions with the products.
  __device__ void store(half* to, float* scales) const {
#pragma unroll
    for (int i = 0; i < T::kEach; ++i) {
      const float4 v = values[i];
      float largest = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
#pragma unroll
      for (int width = kLanes / 2; width > 0; width /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(kWarp, largest, width));
      // Powers of two by their bits: 127 + exponent, without a fraction.
      const unsigned bits = min(max(__float_as_uint(largest) >> 23, kLeast + 127u), kMost + 127u);
      const float scale = __uint_as_float((kTop + 2 * 127 - bits) << 23);
      uint2 hi, lo;
      split(v.x * scale, v.y * scale, hi.x, lo.x);
      split(v.z * scale, v.w * scale, hi.y, lo.y);
      const int r = row() + kRowsApart * i;
      half* const at = to + r * kStrideX + k();
      *reinterpret_cast<uint2*>(at) = hi;
      *reinterpret_cast<uint2*>(at + kBlockK) = lo;
      scales[r] = __uint_as_float((bits - kTop) << 23) * kSmaller;
    }
  }
};

// Packed, W is (n / 16, k / 16, hi and lo, 32 lanes, 2 groups of 8 columns, 2 halves of k, 2 k).
template <typename T>
struct Columns {
  const uint4* from;  // this thread's chunk of the next slab
  int64_t strip;      // chunks between strips of 16 columns

  __device__ Columns(const ProductParams& p, int n0, int k0) {
    strip = static_cast<int64_t>(p.k / 16) * 2 * 32;
    from = static_cast<const uint4*>(p.weight) + n0 / 16 * strip + k0 / 16 * 2 * 32 + threadIdx.x;
  }
  __device__ void copy(char* stage) {
#pragma unroll
    for (int i = 0; i < T::kBlockN / 16; ++i) {
#pragma unroll
      for (int j = 0; j < kStripChunks; j += kThreads)
        __pipeline_memcpy_async(stage + sizeof(uint4) * (i * kStripChunks + j + threadIdx.x),
                                from + i * strip + j, sizeof(uint4));
    }
    from += kStripChunks;
  }
};

template <typename T>
__global__ __launch_bounds__(kThreads, T::kResident) void product(ProductParams p) {
  ptx::allow_next();
  ATTENTION_DYNAMIC_SHARED(char, smem);
  char* const s_w = smem;
  half* const s_x = reinterpret_cast<half*>(smem + T::kStages * T::kBytesW);
  float* const s_scales = reinterpret_cast<float*>(s_x + 2 * T::kHalvesX);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int strip = warp * T::kStrips;  // the warp's first

  const Slabs slabs(p, T::kBlockM, T::kBlockN, kBlockK);
  const int end = slabs.first_of(blockIdx.x + 1);
  int count;
  for (int slab = slabs.first_of(blockIdx.x); slab < end; slab += count) {
    const int tile = slab / slabs.per_tile, first = slab % slabs.per_tile;
    count = min(end - slab, slabs.per_tile - first);
    const int m0 = tile % slabs.tiles_m * T::kBlockM;
    const int n0 = tile / slabs.tiles_m * T::kBlockN;

    Columns<T> columns(p, n0, first * kBlockK);
#pragma unroll
    for (int s = 0; s < T::kStages - 1; ++s) {
      if (s < count) columns.copy(s_w + s * T::kBytesW);
      __pipeline_commit();
    }
    ptx::wait_for_previous();  // it does not write the weights, but perhaps the rest
    Rows<T> rows(p, m0, first * kBlockK);
    rows.load(count > 1);
    rows.store(s_x, s_scales);
    rows.load(count > 2);

    float sums[kRows][2 * T::kStrips][4] = {};
    int stage = 0, free = T::kStages - 1;
    for (int s = 0; s < count; ++s) {
      // Every thread now sees this slab and is done with the one before it.
      __pipeline_wait_prior(T::kStages - 2);
      __syncthreads();
      if (s + T::kStages - 1 < count) columns.copy(s_w + free * T::kBytesW);
      __pipeline_commit();
      const half* const from_x = s_x + s % 2 * T::kHalvesX + lane % 16 * kStrideX + lane / 16 * 8;
      const auto* const from_w =
          reinterpret_cast<const uint4*>(s_w + stage * T::kBytesW) + strip * kStripChunks + lane;
      const float* const scales = s_scales + s % 2 * T::kBlockM + lane / 4;
      float scale[kRows][2];
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        scale[i][0] = scales[16 * i], scale[i][1] = scales[16 * i + 8];
#pragma unroll
      for (int chain = 0; chain < kChains; ++chain) {
        unsigned hi[kSteps][kRows][4], lo[kSteps][kRows][4];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            const half* const at = from_x + 16 * i * kStrideX + 16 * (chain * kSteps + step);
            ptx::load_matrices(hi[step][i], at);
            ptx::load_matrices(lo[step][i], at + kBlockK);
          }
        }
        float acc[kRows][2 * T::kStrips][4] = {};
#pragma unroll
        for (int j = 0; j < T::kStrips; ++j) {
          const auto load = [&](unsigned (&w)[kSteps][2][2], int is_lo) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
              const uint4 v =
                  from_w[j * kStripChunks + 2 * 32 * (chain * kSteps + step) + 32 * is_lo];
              w[step][0][0] = v.x, w[step][0][1] = v.y, w[step][1][0] = v.z, w[step][1][1] = v.w;
            }
          };
          const auto add = [&](const unsigned (&x)[kSteps][kRows][4],
                               const unsigned (&w)[kSteps][2][2]) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
#pragma unroll
              for (int i = 0; i < kRows; ++i) {
#pragma unroll
                for (int g = 0; g < 2; ++g)
                  ptx::mma<false>(acc[i][2 * j + g], x[step][i], w[step][g]);
              }
            }
          };
          unsigned w_hi[kSteps][2][2], w_lo[kSteps][2][2];
          load(w_hi, 0);
          add(lo, w_hi);
          if (chain == 0 && j == T::kStrips - 1) {
            // Between products, so that the compiler can mix them with the split. After the last
            // slab, old rows are stored where nobody reads them.
            rows.store(s_x + (s + 1) % 2 * T::kHalvesX, s_scales + (s + 1) % 2 * T::kBlockM);
            rows.load(s + 3 < count);
          }
          load(w_lo, 1);
          add(hi, w_lo);
          add(hi, w_hi);  // the large products last: less is cut off
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
          for (int j = 0; j < 2 * T::kStrips; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e)
              sums[i][j][e] = fmaf(acc[i][j][e], scale[i][e / 2], sums[i][j][e]);
          }
        }
      }
      stage = stage + 1 == T::kStages ? 0 : stage + 1;
      free = free + 1 == T::kStages ? 0 : free + 1;
    }

    // A lane has two columns of two rows. It gives one pair to its neighbour, for the other's pair
    // of the row that it keeps: then each has four columns of one row.
    // From part to part either the block or the tile advances by one: their sum numbers the parts.
    float* const part =
        p.workspace + static_cast<int64_t>(blockIdx.x + tile) * T::kBlockM * T::kBlockN;
    const bool is_odd = lane % 2;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = 16 * i + lane / 4 + is_odd * 8;
#pragma unroll
      for (int j = 0; j < 2 * T::kStrips; ++j) {
        const float (&sum)[4] = sums[i][j];
        const float x = __shfl_xor_sync(kWarp, is_odd ? sum[0] : sum[2], 1);
        const float y = __shfl_xor_sync(kWarp, is_odd ? sum[1] : sum[3], 1);
        float4 v = is_odd ? float4{x, y, sum[2], sum[3]} : float4{sum[0], sum[1], x, y};
        if (m0 + row >= p.m) continue;
        const int column = 16 * strip + 8 * j + lane % 4 / 2 * 4;
        const int4 exponent = *reinterpret_cast<const int4*>(p.exponents + n0 + column);
        const auto undo = [](float& sum, int exponent) {
          // Two steps, as the power itself may be too large for a float.
          const int all = exponent - kTop + kShift, half_of_it = all >> 1;
          sum = sum * power_of_two(half_of_it) * power_of_two(all - half_of_it);
        };
        undo(v.x, exponent.x), undo(v.y, exponent.y), undo(v.z, exponent.z), undo(v.w, exponent.w);
        if (count == slabs.per_tile) {
          finish_chunk(p, m0 + row, n0 + column, v);
        } else {
          store4(part + row * T::kBlockN + column, v);
        }
      }
    }
    __syncthreads();
  }
}

template <typename T>
cudaError_t launch_product(const ProductParams& p, cudaStream_t stream) {
  return launch_tile<T>(product<T>, p, stream);
}

}  // namespace

namespace ATTENTION_VERSION {

int64_t scratch_floats(const ProductParams&) { return 0; }

cudaError_t launch(const ProductParams& params, cudaStream_t stream) {
  switch (params.tile) {  // must match KERNELS in product.py
    case 0:
      return launch_product<Tile<1, 3, 3>>(params, stream);
    case 1:
      return launch_product<Tile<2, 2, 2>>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace ATTENTION_VERSION
}  // namespace attention
