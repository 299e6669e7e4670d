// Operations of emulated blocks, fragments and asynchronous copies, as C functions that
// test_emulator.py and test_tensor_cores.py call through ctypes. Built with g++ alone.

#include <cuda_pipeline.h>
#include <mma.h>

#include "runtime.h"

using namespace nvcuda::wmma;

namespace {

struct Matrices {
  const half* a;
  const half* b;
  const void* c;
  void* d;
  int lda, ldb, ldc;
  layout_t layout;  // layout of c and d
};

template <int m, int n, int k, typename LayoutA, typename LayoutB, typename T>
__global__ void product(Matrices in) {
  fragment<matrix_a, m, n, k, half, LayoutA> rA;
  fragment<matrix_b, m, n, k, half, LayoutB> rB;
  fragment<accumulator, m, n, k, T> rC;
  load_matrix_sync(rA, in.a, in.lda);
  load_matrix_sync(rB, in.b, in.ldb);
  load_matrix_sync(rC, static_cast<const T*>(in.c), in.ldc, in.layout);
  mma_sync(rC, rA, rB, rC);
  store_matrix_sync(static_cast<T*>(in.d), rC, in.ldc, in.layout);
}

template <int m, int n, int k, typename LayoutA, typename LayoutB>
cudaError_t launch_types(bool is_float, const Matrices& in) {
  return is_float ? attention::launch_kernel(product<m, n, k, LayoutA, LayoutB, float>, 1, 32, 0,
                                             nullptr, in)
                  : attention::launch_kernel(product<m, n, k, LayoutA, LayoutB, half>, 1, 32, 0,
                                             nullptr, in);
}

template <int m, int n, int k>
cudaError_t launch_layouts(bool a_rows, bool b_rows, bool is_float, const Matrices& in) {
  if (a_rows) {
    return b_rows ? launch_types<m, n, k, row_major, row_major>(is_float, in)
                  : launch_types<m, n, k, row_major, col_major>(is_float, in);
  }
  return b_rows ? launch_types<m, n, k, col_major, row_major>(is_float, in)
                : launch_types<m, n, k, col_major, col_major>(is_float, in);
}

// Returns whether an accumulator is laid out like matrix_a: on sm_80, not below.
__global__ void compare_uses(const half* a, const float* c, float* same) {
  fragment<matrix_a, 16, 16, 16, half, row_major> rA;
  fragment<accumulator, 16, 16, 16, float> rC;
  load_matrix_sync(rA, a, 16);
  load_matrix_sync(rC, c, 16, mem_row_major);
  bool equal = true;
  for (int i = 0; i < rA.num_elements; ++i) {
    equal = equal && float(rA.x[i]) == rC.x[i % rC.num_elements];
  }
  same[threadIdx.x] = equal;
}

enum Fault {
  kNone,
  kMissingLanes,
  kTwoPlaces,
  kMixedWithShuffle,
  kMisaligned,
  kLeadingDimension,
  kArguments,
  kWrittenBefore,
  kWrittenAfter,
  kReadBefore,
  kDuplicates,
  kNobodyLoaded,
};

__global__ void fail(Fault fault, half* a, float* d) {
  const int lane = threadIdx.x;
  fragment<matrix_a, 16, 16, 16, half, row_major> rA;
  fragment<matrix_b, 16, 16, 16, half, row_major> rB;
  fragment<accumulator, 16, 16, 16, float> rC;
  fill_fragment(rC, 0.0f);
  if (fault != kNobodyLoaded) load_matrix_sync(rB, a, 16);
  if (fault == kMissingLanes && lane >= 16) return;
  if (fault == kWrittenBefore && lane == 31) a[0] = a[0] + 1;
  if (fault == kMisaligned) load_matrix_sync(rA, a + 8, 16);         // MISALIGNED
  if (fault == kLeadingDimension) load_matrix_sync(rA, a, 12);       // LEADING DIMENSION
  if (fault == kArguments) load_matrix_sync(rA, a + lane * 16, 16);  // ARGUMENTS
  load_matrix_sync(rA, a, 16);                                       // LOAD
  if (fault == kWrittenAfter) a[16 * (15 - lane % 16)] = 2;
  if (fault == kDuplicates && lane == 3) rA.x[9] = 5;
  if (fault == kTwoPlaces && lane % 2 == 0) {
    mma_sync(rC, rA, rB, rC);  // ONE PLACE
  } else if (fault == kMixedWithShuffle && lane % 2 == 0) {
    __syncwarp();  // SYNCWARP
  } else {
    mma_sync(rC, rA, rB, rC);  // MMA
  }
  store_matrix_sync(d, rC, 16, mem_row_major);
  if (fault != kReadBefore) __syncwarp();
  const float x = d[255 - 8 * lane];
  __syncwarp();
  d[lane] = x;
}

enum CopyFault { kCopied, kEarly, kNotCommitted, kSize, kAddress, kNotShared };

// 4 threads copy two groups of 16 floats; the block reads the first as soon as it arrives.
__global__ void copy(CopyFault fault, const float* from, float* to) {
  __shared__ __align__(16) float s_data[32];
  const int i = 4 * threadIdx.x;
  __pipeline_memcpy_async(s_data + i, from + i, 16);
  if (fault != kNotCommitted) __pipeline_commit();
  __pipeline_memcpy_async(s_data + 16 + i, from + 16 + i, 16, 8);
  __pipeline_commit();
  if (fault == kSize) __pipeline_memcpy_async(s_data + i, from + i, 12);         // SIZE
  if (fault == kAddress) __pipeline_memcpy_async(s_data + i + 1, from + i, 16);  // ADDRESS
  if (fault == kNotShared) __pipeline_memcpy_async(to + i, from + i, 16);        // NOT SHARED
  if (fault != kEarly) __pipeline_wait_prior(1);
  __syncthreads();
  for (int j = 0; j < 32; ++j) to[j] = s_data[j];
  __syncthreads();
  __pipeline_wait_prior(0);
  __syncthreads();
  for (int j = 16; j < 32; ++j) to[16 + j] = s_data[j];
}

enum BlockFault {
  kReversed,
  kTwoBarriers,
  kNotNamed,
  kMasks,
  kPastTheEnd,
  kBeforeTheStart,
  kWild,
  kDeep,
  kNotWritten,
  kNotWrittenStatic,
  kNoPart,
};

__attribute__((noinline)) void take_stack() {
  volatile char frame[58 * 1024];  // of the 64 KB that a thread has
  for (volatile char& byte : frame) byte = 1;
}

// Runs blocks of 64 threads, each of which reverses 64 numbers through shared memory.
__global__ void reverse(BlockFault fault, float* d) {
  ATTENTION_DYNAMIC_SHARED(float, smem);
  __shared__ float s_static[64];
  const int i = threadIdx.x;
  if (fault != kNotWritten || blockIdx.x == 0 || i != 5) smem[i] = static_cast<float>(i);
  if (fault != kNotWrittenStatic || blockIdx.x == 0 || i != 5) s_static[i] = 0.0f;
  if (fault == kPastTheEnd && i == 3) smem[64] = 0.0f;
  if (fault == kBeforeTheStart && i == 3) smem[-1] = 0.0f;
  if (fault == kTwoBarriers && i < 32) {
    __syncthreads();  // ONE BARRIER
  } else {
    __syncthreads();  // BARRIER
  }
  float x = smem[63 - i] + s_static[63 - i];
  if (fault == kNotNamed && i == 1) __syncwarp(1);           // NOT NAMED
  if (fault == kMasks && i < 3) __syncwarp(i == 0 ? 3 : 7);  // MASKS
  if (fault == kNoPart && i < 16) x = __shfl_sync(0xffff, x, 20);
  if (fault == kDeep) take_stack();
  if (fault == kWild && i == 9) d -= int64_t{1} << 42;
  d[64 * blockIdx.x + i] = x;
}

}  // namespace

extern "C" {

// The functions below return this message, or "" on success, because the emulator's types are
// hidden and would hide the functions, too.
const char* outcome(cudaError_t error) {
  static std::string message;
  message = error == cudaSuccess ? "" : cudaGetErrorName(error);
  if (error != cudaSuccess) message += ": " + attention::emulator::last_error();
  return message.c_str();
}

const char* run_product(int m, bool a_rows, bool b_rows, bool is_float, const void* a, int lda,
                        const void* b, int ldb, const void* c, void* d, int ldc, bool c_rows) {
  const Matrices in{
      static_cast<const half*>(a),           static_cast<const half*>(b), c, d, lda, ldb, ldc,
      c_rows ? mem_row_major : mem_col_major};
  switch (m) {
    case 16:
      return outcome(launch_layouts<16, 16, 16>(a_rows, b_rows, is_float, in));
    case 32:
      return outcome(launch_layouts<32, 8, 16>(a_rows, b_rows, is_float, in));
    default:
      return outcome(launch_layouts<8, 32, 16>(a_rows, b_rows, is_float, in));
  }
}

const char* run_compare_uses(const void* a, const float* c, float* same) {
  return outcome(attention::launch_kernel(compare_uses, 1, 32, 0, nullptr,
                                          static_cast<const half*>(a), c, same));
}

const char* run_reverse(int fault, int smem_bytes, float* d) {
  return outcome(attention::launch_kernel(reverse, 2, 64, smem_bytes, nullptr,
                                          static_cast<BlockFault>(fault), d));
}

const char* run_fail(int fault, int threads, void* a, float* d) {
  return outcome(attention::launch_kernel(fail, 1, threads, 0, nullptr, static_cast<Fault>(fault),
                                          static_cast<half*>(a), d));
}

const char* run_copy(int fault, const float* from, float* to) {
  return outcome(
      attention::launch_kernel(copy, 1, 4, 0, nullptr, static_cast<CopyFault>(fault), from, to));
}
}
