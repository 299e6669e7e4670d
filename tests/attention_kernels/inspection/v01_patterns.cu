// v01 - access patterns
//
// Change: each pattern is one line, named by a comment. Those of shared memory have the counts of
//         two warps: requests/wavefronts/conflicts/ways of the worst conflict.
// Why:    their costs are known.
// Cost:   none.
// Tile:   one block of 64 threads
// Layout: contiguous
// Flags:  (none)
// Expect: what the test says.

#include <cuda_pipeline.h>

#include "common.cuh"

namespace attention::ATTENTION_VERSION {

inline __device__ float helper(const float* row, int d, int64_t = 1, int64_t = 2, int64_t = 3,
                               int64_t = 4, int64_t = 5, int64_t = 6) {
  return row[d];
}

inline __device__ void store2(float* row, unsigned d, float x, float y) {
  reinterpret_cast<float2*>(row)[d / 2] = make_float2(x, y);
}

// Its frame is at another place than that of a function with more arguments.
inline __device__ float inner(const float* row) { return row == nullptr ? row[0] : 0.0f; }
inline __device__ float none(const float* row) {
  return inner(row) + (row == nullptr ? row[1] : 0.0f);
}

__global__ void patterns(const float* q, float* o, int head_dim) {
  ATTENTION_DYNAMIC_SHARED(float, smem);
  __shared__ float fixed[64];
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < 4096; i += 64) smem[i] = 0.0f;  // fill 128/128/0/1
  fixed[threadIdx.x] = 0.0f;                                    // static 2/2/0/1
  __syncthreads();
  float x = 0.0f;
  x += smem[lane];                                              // in order 2/2/0/1
  x += smem[7];                                                 // broadcast 2/2/0/1
  x += smem[2 * lane];                                          // every second 2/4/2/2
  x += smem[32 * lane];                                         // a column 2/64/62/32
  x += smem[33 * lane];                                         // a padded column 2/2/0/1
  x += smem[lane % 16 * 32 + lane / 16];                        // half a column twice 2/32/30/16
  x += reinterpret_cast<float4*>(smem)[lane].x;                 // one of four 2/8/6/4
  const float4 a = reinterpret_cast<float4*>(smem)[lane];       // vectors 2/8/0/1
  const float4 b = reinterpret_cast<float4*>(smem)[8 * lane];   // vectors in a column 2/64/56/8
  const float2 c = reinterpret_cast<float2*>(smem)[16 * lane];  // pairs in a column 2/64/60/16
  const float4 d = reinterpret_cast<float4*>(smem)[lane / 2];   // vectors of neighbours 2/4/0/1
  const float4 e = reinterpret_cast<float4*>(smem)[lane / 4 * 2 + lane % 2];  // two by two 2/4/0/1
  const float4 f = reinterpret_cast<float4*>(smem)[lane / 4];   // vectors of four 2/4/0/1
  const float2 g = reinterpret_cast<float2*>(smem)[lane / 2];   // pairs of neighbours 2/2/0/1
  const float4 h = reinterpret_cast<float4*>(smem)[lane % 16];  // vectors of both halves 2/8/0/1
  x += a.y + b.z + c.x + d.x + e.x + f.x + g.x + h.x;
  x += none(smem);               // called before
  x += helper(smem, 32 * lane);  // called 2/64/62/32
  x += fixed[16 * (lane % 4)];   // static column 2/4/2/2
  for (int i = 0; i < 3; ++i) {
    for (int j = 0; j <= lane; ++j) {
      x += smem[j];  // some leave early 192/192/0/1
    }
    x += smem[i];  // all again 6/6/0/1
  }
  if (lane < 8) {
    x += smem[lane];  // eight lanes 2/2/0/1
  } else {
    x += smem[64 + 32 * lane];  // the others 2/48/46/24
  }
  __pipeline_memcpy_async(smem + 4 * threadIdx.x, q + 8 * threadIdx.x, 16);  // asynchronous
  o[threadIdx.x] = x;                                                        // store in order
  o[8 * threadIdx.x] = x;                                                    // store apart
  x += q[threadIdx.x % 2];                                                   // a pair
  store2(o, 2 * threadIdx.x, x, x);                                          // store of a call
  reinterpret_cast<float4*>(o)[threadIdx.x] = reinterpret_cast<const float4*>(q)[threadIdx.x];
  atomicAdd(&smem[lane], 1.0f);                                  // an atomic each
  atomicAdd(&smem[lane / 4], 1.0f);                              // an atomic of four lanes
  atomicMax(reinterpret_cast<int*>(o) + 8 * threadIdx.x, lane);  // an atomic apart
  if (threadIdx.x == 33) printf("x is %g\n", 1.5f);
  if (threadIdx.x == 2) std::printf("1\t2\n");
}

int64_t scratch_floats(const Params&) { return 0; }

cudaError_t launch(const Params& params, cudaStream_t stream) {
  if (params.head_dim == 128) return cudaErrorInvalidValue;
  return launch_kernel(patterns, dim3(1), dim3(64), 4096 * sizeof(float), stream,
                       static_cast<const float*>(params.q), static_cast<float*>(params.o),
                       params.head_dim);
}

}  // namespace attention::ATTENTION_VERSION
