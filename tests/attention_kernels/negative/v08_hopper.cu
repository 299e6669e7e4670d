// v08 - a small attention without softmax, with faults
//
// Change: a field of the parameters chooses the fault in the lines that end with its number.
// Why:    a negative control: on a GPU most faults are races, and rarely change a result.
// Cost:   none.
// Tile:   128 x 64, block 384
// Layout: contiguous
// Role:   struct
// Needs:  sm_90a
// Flags:  (none)
// Expect: an error or a wrong result for every fault; 0 has none.

#include <cuda_fp16.h>

#include "tma.cuh"
#include "wgmma.cuh"

namespace attention {

struct StructParams {
  const __half* q;  // 128 x 64
  const __half* k;  // 64 kTiles x 64, like v
  const __half* v;
  float* o;  // 128 x 64: the sum of the tiles' half(Q K^T) V
  int fault;
};

namespace ATTENTION_VERSION {

using ptx::Barrier;

constexpr int kTiles = 5, kStages = 2, kConsumers = 2;
constexpr int kTileBytes = 64 * 64 * sizeof(__half);
constexpr int kSumBytes = 64 * 64 * sizeof(float);

struct Barriers {
  Barrier k_full[kStages], v_full[kStages], k_empty[kStages], v_empty[kStages];
};

__device__ void produce(const TensorMap& k, const TensorMap& v, unsigned char* sK,
                        unsigned char* sV, Barriers& barriers, int fault) {
  for (int tile = 0; tile < kTiles; ++tile) {
    const int stage = tile % kStages;
    int parity = tile / kStages % 2 ^ 1;
    if (fault == 1) parity ^= 1;  // 1: it waits for the phase after
    ptx::barrier_wait(&barriers.k_empty[stage], parity);
    int bytes = kTileBytes;
    if (fault == 2) bytes /= 2;   // 2
    if (fault == 3) bytes += 16;  // 3
    ptx::barrier_expect(&barriers.k_full[stage], bytes);
    ptx::load_tile(sK + stage * kTileBytes, k, 0, 64 * tile, 0, 0, &barriers.k_full[stage]);
    if (fault != 4) ptx::barrier_wait(&barriers.v_empty[stage], parity);  // 4
    ptx::barrier_expect(&barriers.v_full[stage], kTileBytes);
    ptx::load_tile(sV + stage * kTileBytes, v, 0, 64 * tile, 0, 0, &barriers.v_full[stage]);
  }
}

// Writes Q as load_tile() would.
__device__ void copy_q(unsigned char* sQ, const __half* q, int fault) {
  for (int i = threadIdx.x % 128; i < 64 * 8; i += 128) {
    const int row = i / 8;
    const int chunk = fault == 5 ? i % 8 : i % 8 ^ row % 8;  // 5: not swizzled
    reinterpret_cast<uint4*>(sQ)[row * 8 + chunk] = reinterpret_cast<const uint4*>(q)[i];
  }
  if (fault != 6 && (fault != 38 || threadIdx.x % 128 == 0)) ptx::proxy_fence();  // 6, 38: one
  ptx::named_barrier_sync(threadIdx.x / 128, fault == 7 ? 256 : 128);  // 7: others do not come
}

__device__ unsigned pack(float x, float y) {
  const __half2 pair = __floats2half2_rn(x, y);
  return *reinterpret_cast<const unsigned*>(&pair);
}

__device__ void arrive(Barrier* barrier, int fault) {
  if (threadIdx.x % 32 == 0 || fault == 8) ptx::barrier_arrive(barrier);  // 8: all threads
}

__device__ void consume(const unsigned char* sQ, const unsigned char* sK, const unsigned char* sV,
                        float (&rO)[32], Barriers& barriers, int fault) {
  float rS[32];
  unsigned rP[4][4];
  float early = 0.0f;
  const auto start_qk = [&](int tile) {
    const int stage = tile % kStages;
    int parity = tile / kStages % 2;
    if (fault == 9) parity ^= 1;                                          // 9: of the phase before
    if (fault != 10) ptx::barrier_wait(&barriers.k_full[stage], parity);  // 10
    const uint64_t a = ptx::matrix_descriptor(sQ);
    uint64_t b = ptx::matrix_descriptor(sK + (fault == 11 ? 128 : 0) + stage * kTileBytes);  // 11
    if (fault == 40 && threadIdx.x / 32 == 5) b = a;  // 40: not as its neighbours
    if (fault == 12) b &= ~(uint64_t{3} << 62);       // 12: without the swizzle
    if (fault != 13) ptx::multiply_fence(rS);         // 13
    for (int step = 0; step < 4; ++step) {
      const int bytes = fault == 14 ? 16 * step : 32 * step;  // 14
      ptx::multiply<false>(rS, ptx::advance(a, 32 * step), ptx::advance(b, bytes), step > 0);
    }
    if (fault != 15) ptx::multiply_commit();  // 15
  };
  const auto start_pv = [&](int tile) {
    const int stage = tile % kStages;
    ptx::barrier_wait(&barriers.v_full[fault == 16 ? 0 : stage], tile / kStages % 2);  // 16
    const uint64_t b = ptx::matrix_descriptor(sV + stage * kTileBytes);
    if (fault == 17) {
      ptx::multiply_fence(rO);  // 17: and rP was written
    } else {
      ptx::multiply_fence(rO, rP);
    }
    for (int step = 0; step < 4; ++step) {
      if (fault == 18) {
        ptx::multiply<false>(rO, rP[step], ptx::advance(b, step * 32));  // 18: not transposed
      } else {
        ptx::multiply<false, true>(rO, rP[step], ptx::advance(b, step * 16 * 128));
      }
    }
    ptx::multiply_commit();
    if (fault == 19) rO[0] *= 0.5f;                            // 19
    if (fault == 39) early = rO[1];                            // 39
    if (fault == 20) arrive(&barriers.v_empty[stage], fault);  // 20: too early
  };
  for (int tile = 0; tile < kTiles; ++tile) {
    start_qk(tile);
    if (fault == 21) arrive(&barriers.k_empty[tile % kStages], fault);  // 21: too early
    if (tile > 0) start_pv(tile - 1);
    if (tile > 0 && fault != 22) {
      ptx::multiply_wait<1>(rS);
    } else if (tile > 0) {
      ptx::multiply_wait<2>(rS);  // 22
    } else {
      ptx::multiply_wait<0>(rS);
    }
    if ((fault == 0 || fault >= 41) && threadIdx.x % 32 == 0) {
      const unsigned char* const byte = sK + tile % kStages * kTileBytes;
      early += fault == 42 ? *static_cast<const volatile unsigned char*>(byte) : *byte;  // 42
      if (fault == 0) ptx::proxy_fence();  // 41: after a load, too
    }
    if (fault != 21) arrive(&barriers.k_empty[tile % kStages], fault);
    if (tile > 0 && fault == 23) {
      ptx::multiply_wait<1>(rO);  // 23
    } else if (tile > 0 && fault == 24) {
      ptx::multiply_wait<0>();  // 24: the compiler may use rO before
    } else {
      ptx::multiply_wait<0>(rO);
    }
    if (tile > 0 && fault != 20) arrive(&barriers.v_empty[(tile - 1) % kStages], fault);
    for (int i = 0; i < 16; ++i) rP[i / 4][i % 4] = pack(rS[2 * i], rS[2 * i + 1]);
  }
  start_pv(kTiles - 1);
  if (fault != 25) ptx::multiply_wait<0>(rO);  // 25
  rO[0] += 0.0f * early;
}

// Stores the sums through shared memory, in two tiles of 32 columns.
__device__ void store(const TensorMap& o, unsigned char* sO, const float (&rO)[32], int fault) {
  const int lane = threadIdx.x % 32;
  const auto write = [&](int i, float value) {
    const int row = threadIdx.x % 128 / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    const int chunk = column % 32 / 4 ^ row % 8;
    reinterpret_cast<float*>(sO + column / 32 * 64 * 128)[row * 32 + chunk * 4 + column % 4] =
        value;
  };
  for (int i = 0; i < 32; ++i) write(i, rO[i]);
  if (fault != 26) ptx::proxy_fence();  // 26
  ptx::named_barrier_sync(threadIdx.x / 128, 128);
  if (threadIdx.x % 128 == 0) {
    for (int half = 0; half < 2; ++half)
      ptx::store_tile(o, 32 * half, 64 * (threadIdx.x / 128 - 1), 0, 0, sO + half * 64 * 128);
    if (fault != 27) ptx::store_tiles_commit();   // 27
    if (fault == 28) write(0, 0.0f);              // 28: before it is read
    if (fault != 29) ptx::store_tiles_wait<0>();  // 29
  }
}

__global__ void __launch_bounds__(384)
    attention_kernel(const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
                     const __grid_constant__ TensorMap o, const __half* q, int fault) {
  ATTENTION_ALIGNED_SHARED(unsigned char, smem, 1024);
  unsigned char* sK = smem + kConsumers * kTileBytes;
  unsigned char* sV = sK + kStages * kTileBytes;
  unsigned char* sO = sV + kStages * kTileBytes;
  __shared__ Barriers barriers;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::barrier_init(&barriers.k_full[stage], 1);
      ptx::barrier_init(&barriers.v_full[stage], 1);
      ptx::barrier_init(&barriers.k_empty[stage], 4 * kConsumers + (fault == 30));  // 30
      ptx::barrier_init(&barriers.v_empty[stage], 4 * kConsumers - (fault == 31));  // 31
    }
    if (fault != 32) ptx::barrier_init_fence();  // 32
  }
  if (fault != 33) __syncthreads();  // 33
  if (threadIdx.x < 128) {
    if (fault != 34) ptx::lower_registers<24>();  // 34
    if (threadIdx.x == 0) produce(k, v, sK, sV, barriers, fault);
    return;
  }
  if (fault == 35) {
    ptx::raise_registers<96>();  // 35: it has more
  } else {
    ptx::raise_registers<256 - 16>();
  }
  const int consumer = threadIdx.x / 128 - 1;
  unsigned char* sQ = smem + consumer * kTileBytes;
  sO += consumer * kSumBytes;
  copy_q(sQ, q + consumer * 64 * 64, fault);
  float rO[32] = {};
  consume(sQ, sK, sV, rO, barriers, fault);
  store(o, sO, rO, fault);
}

int64_t scratch_floats(const StructParams&) { return 0; }

cudaError_t launch(const StructParams& p, cudaStream_t stream) {
  const Swizzle swizzle = p.fault == 36 ? Swizzle::kNone : Swizzle::k128;  // 36
  const int rows = p.fault == 37 ? 32 : 64;                                // 37
  TensorMap k, v, o;
  cudaError_t error =
      make_tensor_map(&k, p.k, {64, 64 * kTiles, 1, 1}, {64, 64, 64}, {64, rows, 1, 1});
  if (error == cudaSuccess)
    error =
        make_tensor_map(&v, p.v, {64, 64 * kTiles, 1, 1}, {64, 64, 64}, {64, 64, 1, 1}, swizzle);
  if (error == cudaSuccess)
    error = make_tensor_map(&o, p.o, {64, 64 * kConsumers, 1, 1}, {64, 64, 64}, {32, 64, 1, 1});
  if (error != cudaSuccess) return error;
  return launch_kernel(attention_kernel, 1, 384,
                       (kConsumers + 2 * kStages) * kTileBytes + kConsumers * kSumBytes, stream, k,
                       v, o, p.q, p.fault);
}

}  // namespace ATTENTION_VERSION
}  // namespace attention
