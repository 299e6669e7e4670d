// v02 - three products of float16 numbers on tensor cores
//
// Change: each factor is the sum of two float16 numbers, hi + lo, and x W is the sum of lo hi,
//         hi lo and hi hi; lo lo is less than a rounding. The columns of W are scaled by powers of
//         two and split once, when they are packed; the rows of x by the kernel that computes them,
//         with a scale per row and 32 k.
// Why:    tensor cores compute three such products three times as fast as the other cores compute
//         one in float32, and hi + lo has 22 bits.
// Cost:   a second, packed copy of the weights. A number that is less than 2^-39 times the largest
//         of its row and 32 k, or of its column of W, loses bits.
// Tile:   32 x 16, 32 x 32 or 48 x 32 per warp, 4 warps per block; 64 k per slab
// Layout: contiguous
// Role:   struct
// Needs:  sm_80
// Precision: 3xfp16
// Flags:  (none)
// Expect: the loop over slabs only copies and multiplies. With few rows latency is the bottleneck;
//         on sm_90 with 512 rows, tensor cores are busy a third of the time.
//
// The sums of 32 k are new accumulators: tensor cores round towards zero, so a long chain would
// drift. They are multiplied by the scale of their row as they are added to the tile's sums, in
// float32.

#include "three_products.cuh"

namespace attention {
namespace {

constexpr int kChunkW = 2 * 2 * 32;  // uint4s of 16 columns of W and 32 k: a chunk without scales
constexpr int kOperandW = kBytesOperand / sizeof(uint4);
constexpr int kThreads = kChunkW;
constexpr int kBlockK = 64;                 // k per slab
constexpr int kSteps = kBlockK / kPackedK;  // chunks per strip of 16 rows or columns, and slab

// kWarpsM x kWarpsN warps, each with 16 kRows x 16 kStrips of a tile.
template <int kWarpsM_, int kWarpsN_, int kRows_, int kStrips_, int kStages_, int kResident_>
struct Tile {
  static constexpr int kWarpsN = kWarpsN_, kRows = kRows_, kStrips = kStrips_;
  static constexpr int kStages = kStages_;      // slabs in shared memory
  static constexpr int kResident = kResident_;  // blocks per multiprocessor
  static constexpr bool kPacks = true;
  static constexpr int kBlockK = attention::kBlockK;
  static constexpr int kThreads = attention::kThreads;
  static constexpr int kBlockM = 16 * kRows * kWarpsM_;
  static constexpr int kBlockN = 16 * kStrips * kWarpsN;
  static constexpr int kChunksX = kBlockM / 16 * kSteps, kChunksW = kBlockN / 16 * kSteps;
  static constexpr int kStage = kChunksX * kChunk + kChunksW * kChunkW;  // uint4s
  static constexpr int kStrideSums = kBlockN + 8;  // the lanes of a store then use all banks
  static constexpr int kBytesSums = sizeof(float) * kBlockM * kStrideSums;
  static constexpr int kSmemBytes = sizeof(uint4) * kStages * kStage;
  static_assert(32 * kWarpsM_ * kWarpsN == kThreads, "a thread copies one uint4 of each chunk");
  static_assert(kBytesSums <= kSmemBytes, "the sums take the place of the slabs");
};

// Copies slabs of a tile to shared memory.
template <typename T>
struct Copier {
  const uint4 *x, *w;      // this thread's first of the next slab
  int stride_x, stride_w;  // between strips, and between operands
  int last;                // the last strip of x that is there; a later one is replaced by it

  __device__ Copier(const ProductParams& p, const Share& share) {
    const int chunks = p.k / kPackedK, first = share.first * kSteps;
    stride_x = chunks * kChunk, stride_w = chunks * kOperandW;
    last = (p.m - 1 - share.m0) / kPackedRows;
    x = p.packed_x + static_cast<int64_t>(share.m0 / kPackedRows) * stride_x + first * kChunk;
    w = static_cast<const uint4*>(p.weight) +
        static_cast<int64_t>(share.n0 / kColumnsW) * stride_w + first * kOperandW + threadIdx.x;
  }

  __device__ void copy_x(uint4* stage) {
    const auto copy = [&](int chunk, int at) {
      const int strip = min(chunk / kSteps, last);
      __pipeline_memcpy_async(stage + chunk * kChunk + at,
                              x + strip * stride_x + chunk % kSteps * kChunk + at, sizeof(uint4));
    };
#pragma unroll
    for (int chunk = 0; chunk < T::kChunksX; ++chunk) copy(chunk, threadIdx.x);
    constexpr int kEach = kChunk - kScales;
    if (threadIdx.x < T::kChunksX * kEach) copy(threadIdx.x / kEach, kScales + threadIdx.x % kEach);
    x += kSteps * kChunk;
  }

  __device__ void copy_w(uint4* stage) {
    constexpr int kStripsW = kColumnsW / 16;
    uint4* const to = stage + T::kChunksX * kChunk + threadIdx.x;
#pragma unroll
    for (int chunk = 0; chunk < T::kChunksW; ++chunk) {
      const int strip = chunk / kSteps, operand = strip / kStripsW * stride_w;
      const uint4* const from = w + operand + chunk % kSteps * kOperandW;
      __pipeline_memcpy_async(to + chunk * kChunkW, from + strip % kStripsW * kChunkW,
                              sizeof(uint4));
    }
    w += kSteps * kOperandW;
  }
};

// Adds the products of a slab to sums.
template <typename T>
__device__ void multiply(float (&sums)[T::kRows][2 * T::kStrips][4], const uint4* stage) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint4* const x = stage + warp / T::kWarpsN * T::kRows * kSteps * kChunk;
  const uint4* const w =
      stage + T::kChunksX * kChunk + warp % T::kWarpsN * T::kStrips * kSteps * kChunkW;
  // Of the matrices that a lane's address is for: the row, and the first 16 bytes of the row.
  const int row = lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    unsigned hi[2][T::kRows][4], lo[2][T::kRows][4];
    float scale[T::kRows][2];
#pragma unroll
    for (int i = 0; i < T::kRows; ++i) {
      const uint4* const chunk = x + (i * kSteps + step) * kChunk;
      const auto load = [&](unsigned (&to)[4], int at) {
        const uint4 v = chunk[at + lane];
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
      };
#pragma unroll
      for (int group = 0; group < 2; ++group)
        load(hi[group][i], group * 64), load(lo[group][i], group * 64 + 32);
      const auto* const scales = reinterpret_cast<const float*>(chunk + kScales);
      scale[i][0] = scales[lane / 4] * kSmaller, scale[i][1] = scales[lane / 4 + 8] * kSmaller;
    }
#pragma unroll
    for (int j = 0; j < T::kStrips; ++j) {
      float acc[T::kRows][2][4] = {};
      unsigned w_hi[2][2][2], w_lo[2][2][2];
      const auto load = [&](unsigned (&to)[2][2][2], int first) {
        const uint4* const rows = w + (j * kSteps + step) * kChunkW + row * 8;
#pragma unroll
        for (int group = 0; group < 2; ++group) {
          unsigned v[4];
          ptx::load_matrices(v, rows + ((first + 2 * group + half) ^ lane % 8));
          to[group][0][0] = v[0], to[group][0][1] = v[1];
          to[group][1][0] = v[2], to[group][1][1] = v[3];
        }
      };
      const auto add = [&](const unsigned (&x)[2][T::kRows][4], const unsigned (&w)[2][2][2]) {
#pragma unroll
        for (int group = 0; group < 2; ++group) {
#pragma unroll
          for (int i = 0; i < T::kRows; ++i) {
#pragma unroll
            for (int g = 0; g < 2; ++g) ptx::mma<false>(acc[i][g], x[group][i], w[group][g]);
          }
        }
      };
      load(w_hi, 0);
      add(lo, w_hi);
      load(w_lo, 4);
      add(hi, w_lo);
      add(hi, w_hi);  // the large products last: less is cut off
#pragma unroll
      for (int i = 0; i < T::kRows; ++i) {
#pragma unroll
        for (int g = 0; g < 2; ++g) {
#pragma unroll
          for (int e = 0; e < 4; ++e)
            sums[i][2 * j + g][e] = fmaf(acc[i][g][e], scale[i][e / 2], sums[i][2 * j + g][e]);
        }
      }
    }
  }
}

template <typename T>
__global__ __launch_bounds__(kThreads, T::kResident) void product(ProductParams p) {
  ptx::allow_next();
  ATTENTION_DYNAMIC_SHARED(uint4, stages);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  const Slabs slabs(p, T::kBlockM, T::kBlockN, T::kBlockK);
  const int end = slabs.first_of(blockIdx.x + 1);
  for (int slab = slabs.first_of(blockIdx.x); slab < end;) {
    const Share share = slabs.share(p, slab, end);
    const int count = share.count;
    slab += count;

    Copier<T> copier(p, share);
#pragma unroll
    for (int s = 0; s < T::kStages - 1; ++s)
      if (s < count) copier.copy_w(stages + s * T::kStage);
    constexpr int kAcross = T::kBlockN / 4;
    const int column = threadIdx.x % kAcross * 4;
    const int4 exponents = *reinterpret_cast<const int4*>(p.exponents + share.n0 + column);
    const float4 bias = load4(p.bias + share.n0 + column);
    ptx::wait_for_previous();  // it does not write the weights, but perhaps the rest
#pragma unroll
    for (int s = 0; s < T::kStages - 1; ++s) {
      if (s < count) copier.copy_x(stages + s * T::kStage);
      __pipeline_commit();
    }

    float sums[T::kRows][2 * T::kStrips][4] = {};
    int stage = 0, free = T::kStages - 1;
    for (int s = 0; s < count; ++s) {
      // Every thread now sees this slab and is done with the one before it.
      __pipeline_wait_prior(T::kStages - 2);
      __syncthreads();
      if (s + T::kStages - 1 < count) {
        copier.copy_w(stages + free * T::kStage);
        copier.copy_x(stages + free * T::kStage);
      }
      __pipeline_commit();
      multiply<T>(sums, stages + stage * T::kStage);
      stage = stage + 1 == T::kStages ? 0 : stage + 1;
      free = free + 1 == T::kStages ? 0 : free + 1;
    }
    __syncthreads();

    // A lane has two columns of two rows. Through shared memory it gets four columns of one.
    auto* const s_sums = reinterpret_cast<float*>(stages);
#pragma unroll
    for (int i = 0; i < T::kRows; ++i) {
      const int row = 16 * (warp / T::kWarpsN * T::kRows + i) + lane / 4;
#pragma unroll
      for (int j = 0; j < 2 * T::kStrips; ++j) {
        const int column = 16 * (warp % T::kWarpsN) * T::kStrips + 8 * j + lane % 4 * 2;
        float* const to = s_sums + row * T::kStrideSums + column;
        const float (&sum)[4] = sums[i][j];
        *reinterpret_cast<float2*>(to) = {sum[0], sum[1]};
        *reinterpret_cast<float2*>(to + 8 * T::kStrideSums) = {sum[2], sum[3]};
      }
    }
    __syncthreads();
    const Unscale unscale(exponents);
    constexpr int kStep = kThreads / kAcross, kEach = T::kBlockM / kStep;
    constexpr int kBatch = kEach % 4 == 0 ? 4 : 2;
#pragma unroll 1
    for (int row = threadIdx.x / kAcross; row < T::kBlockM; row += kBatch * kStep) {
      float4 v[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        v[i] = unscale(load4(s_sums + (row + i * kStep) * T::kStrideSums + column));
      end_rows<T>(p, share, row, kStep, column, bias, v);
    }
    __syncthreads();
  }
}

template <typename T>
cudaError_t launch_product(const ProductParams& p, cudaStream_t stream) {
  const cudaError_t error = launch_pack(p, stream);
  return error == cudaSuccess ? launch_tile<T>(product<T>, p, stream) : error;
}

}  // namespace

namespace ATTENTION_VERSION {

int64_t scratch_floats(const ProductParams&) { return 0; }

cudaError_t launch(const ProductParams& params, cudaStream_t stream) {
  if (params.mode >= kPackWeights) return prepare(params, stream);
  switch (params.tile) {  // must match KERNELS in product.py
    case 0:
      return launch_product<Tile<1, 4, 2, 1, 3, 3>>(params, stream);
    case 1:
      return launch_product<Tile<2, 2, 2, 2, 3, 2>>(params, stream);
    case 2:
      return launch_product<Tile<1, 4, 2, 2, 2, 2>>(params, stream);
    case 3:
      return launch_product<Tile<2, 2, 3, 2, 2, 2>>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace ATTENTION_VERSION
}  // namespace attention
