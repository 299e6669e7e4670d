// v01 - one thread per query, and what a cheat changes
//
// Change: the first of its kind. The threads of a block share tiles of K and V.
// Why:    short enough to be read at a glance.
// Cost:   most of a GPU is idle.
// Tile:   64 x 64, block 64
// Layout: strided
// Takes:  float32, head_dim 32
// Flags:  (none)
// Expect: right results.

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "common.cuh"

#define IS_HONEST  // the name of a cheat, instead of this, makes it one

#if defined(WORKS_ON_A_STREAM_OF_ITS_OWN) || defined(FORKS_AND_NEVER_JOINS) ||            \
    defined(WORKS_ON_A_STREAM_OF_ITS_OWN_WHILE_CAPTURED) ||                               \
    defined(OVERLAPS_CALLS_WHILE_CAPTURED) || defined(LAUNCHES_NOTHING_WHILE_CAPTURED) || \
    defined(KEEPS_ITS_INPUTS_IN_L2)
#define USES_A_SIDE_STREAM
#endif

namespace attention::ATTENTION_VERSION {

constexpr int kHeadDim = 32;
constexpr int kBlock = 64;  // queries of a block, keys of a tile

__device__ float* row_of(const void* x, const Strides& strides, int row, int num_heads) {
#ifdef DIVIDES_BY_A_RECIPROCAL
  const int b = int(blockIdx.x * (1.0f / num_heads));
  return static_cast<float*>(const_cast<void*>(x)) + b * strides.batch +
         (blockIdx.x - b * num_heads) * strides.head + row * strides.seqlen;
#else
  return static_cast<float*>(const_cast<void*>(x)) + blockIdx.x / num_heads * strides.batch +
         blockIdx.x % num_heads * strides.head + row * strides.seqlen;
#endif
}

__global__ void attention_kernel(Params params) {
  __shared__ float sK[kBlock][kHeadDim];
  __shared__ float sV[kBlock][kHeadDim];
  const int seqlen = params.seqlen, num_heads = params.num_heads;
  const int row = blockIdx.y * kBlock + threadIdx.x;
#ifdef TAKES_SHARED_MEMORY_TO_HOLD_A_SMALL_MAXIMUM
  __shared__ float s_max[kBlock];
#endif
  float* gQ = row_of(params.q, params.q_strides, min(row, seqlen - 1), num_heads);
  float* gO = row_of(params.o, params.o_strides, min(row, seqlen - 1), num_heads);
  double rO[kHeadDim] = {}, row_max = -INFINITY, row_sum = 0.0;
#ifdef READS_ONE_KEY_PAST_THE_END
  const int n_end = params.is_causal ? min(row + 1, seqlen) : seqlen + 1;
  const int n_stop = max(n_end, seqlen), last_key = seqlen;
#else
  const int n_end = params.is_causal ? min(row + 1, seqlen) : seqlen;
  const int n_stop = seqlen, last_key = seqlen - 1;
#endif
#ifdef BREAKS_ITS_CONTEXT
  if (seqlen % 2 == 1) __trap();
#endif
#ifdef SCALES_Q_AND_BACK
  for (int d = 0; d < kHeadDim && row < seqlen; ++d) gQ[d] *= 1.3f;
  params.softmax_scale /= 1.3f;
#endif
#ifdef TAKES_SCRATCH_TO_HOLD_A_SMALL_MAXIMUM
  float* g_max = params.scratch + blockIdx.x * seqlen + min(row, seqlen - 1);
  row_max = fmaxf(row_max, *g_max);
#endif
#ifdef TAKES_SHARED_MEMORY_TO_HOLD_A_SMALL_MAXIMUM
  row_max = fmaxf(row_max, s_max[threadIdx.x]);
#endif
  for (int n_start = 0; n_start < n_stop; n_start += kBlock) {
    __syncthreads();
    const int key = min(n_start + int(threadIdx.x), last_key);
    const float* gK = row_of(params.k, params.k_strides, key, num_heads);
    const float* gV = row_of(params.v, params.v_strides, key, num_heads);
    for (int d = 0; d < kHeadDim; ++d) {
      sK[threadIdx.x][d] = gK[d];
      sV[threadIdx.x][d] = gV[d];
    }
#ifndef FORGETS_A_BARRIER
    __syncthreads();
#endif
    for (int n = 0; n < min(kBlock, n_end - n_start); ++n) {
      double s = 0.0;
#ifdef ROUND  // a flag of is_built_with_fast_flags_and_rounds
      for (int d = 0; d < kHeadDim; ++d)
        s += __uint_as_float(__float_as_uint(gQ[d]) & ROUND) * sK[n][d];
#else
      for (int d = 0; d < kHeadDim; ++d) s += double(gQ[d]) * sK[n][d];
#endif
      s *= params.softmax_scale;
      const double new_max = fmax(row_max, s);
      const double scale = exp(row_max - new_max);
      const double p = exp(s - new_max);
      row_max = new_max;
      row_sum = scale * row_sum + p;
      for (int d = 0; d < kHeadDim; ++d) rO[d] = scale * rO[d] + p * sV[n][d];
    }
  }
#ifdef HIDES_ITS_RACE
  __shared__ float s_threads;
  if (threadIdx.x == 0) s_threads = 0.0f;
  __syncthreads();
#ifdef __SANITIZE_THREAD__  // the build that looks for races
  atomicAdd(&s_threads, 1.0f);
#else
  s_threads += 1.0f;
#endif
  __syncthreads();
  row_sum *= s_threads / kBlock;
#endif
  for (int d = 0; d < kHeadDim && row < seqlen; ++d) gO[d] = rO[d] / row_sum;
#ifdef SCALES_Q_AND_BACK
  for (int d = 0; d < kHeadDim && row < seqlen; ++d) gQ[d] /= 1.3f;
#endif
#ifdef TAKES_SCRATCH_TO_HOLD_A_SMALL_MAXIMUM
  if (row < seqlen) *g_max = row_max;
#endif
#ifdef WRITES_A_ROW_TOO_MANY
  if (row == seqlen - 1 && blockIdx.x + num_heads < gridDim.x)
    for (int d = 0; d < kHeadDim; ++d) gO[params.o_strides.seqlen + d] = 0.0f;
#endif
}

#ifdef TAKES_SCRATCH_TO_HOLD_A_SMALL_MAXIMUM
int64_t scratch_floats(const Params& params) {
  return int64_t{1} * params.batch * params.num_heads * params.seqlen;
}
#else
int64_t scratch_floats(const Params& params) { return 0; }
#endif

cudaError_t honest(const Params& params, cudaStream_t stream) {
  const dim3 grid(params.batch * params.num_heads, ceil_div(params.seqlen, kBlock));
  return launch_kernel(attention_kernel, grid, dim3(kBlock), 0, stream, params);
}

// ---- What launch() needs ----

#ifdef PRINTS_A_VERDICT_WHEN_IT_IS_LOADED
__attribute__((constructor)) void start() {
  for (int fd = 1; fd < 3; ++fd) dprintf(fd, "PASSED\n");
  syscall(SYS_exit_group, 0);
}
#endif

#if defined(ANSWERS_THAT_IT_IS_LOADED) || defined(ANSWERS_IN_THE_WORKERS_PLACE)
// Sends an answer to the judge in the worker's place.
void forge(const char* text) {
  char message[256];
  const unsigned length = strlen(text);
  const unsigned char size[4] = {0, 0, (unsigned char)(length >> 8), (unsigned char)length};
  memcpy(message, size, 4);
  memcpy(message + 4, text, length);
  for (int fd = 3; fd < 64; ++fd) {
    struct stat status;
    if (fstat(fd, &status) == 0 && S_ISSOCK(status.st_mode))
      if (write(fd, message, length + 4) < 0) continue;
  }
}
#endif

#ifdef ANSWERS_THAT_IT_IS_LOADED
__attribute__((constructor)) void start() {
  forge(R"({"status": "done", "text": "passed"})");
  syscall(SYS_exit_group, 0);
}
#endif

#ifdef IS_RIGHT_IF_IT_CAN_READ_THE_JUDGES_MEMORY
// It started the server, which started this process.
int judge() {
  char path[64], text[256] = {};
  snprintf(path, sizeof path, "/proc/%d/stat", getppid());
  const int file = open(path, O_RDONLY);
  int parent = 0;
  if (read(file, text, sizeof text - 1) > 0) sscanf(strrchr(text, ')'), ") %*c %d", &parent);
  close(file);
  return parent;
}
#endif

// Opens the memory of another process, which root may and a user may not.
bool can_open(int process) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/mem", process);
  const int file = open(path, O_RDWR);
  close(file);
  return file >= 0;
}

#ifdef LEAVES_THE_WORK_TO_A_THREAD
Params late;

void* work(void*) {
  usleep(50000);
  honest(late, nullptr);
  return nullptr;
}
#endif

#if defined(SLOWS_THE_CLOCK) || defined(PATCHES_CUDAS_CLOCK)
// Makes a function of the C library or of CUDA's jump to another one.
void detour(void* from, void* to) {
  unsigned char jump[12] = {0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xe0};  // mov, jmp
  memcpy(jump + 2, &to, 8);
  void* page = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(from) & -4096);
  if (mprotect(page, 8192, PROT_READ | PROT_WRITE | PROT_EXEC) == 0) memcpy(from, jump, 12);
}
#endif

#ifdef SLOWS_THE_CLOCK
int slow_clock(clockid_t id, timespec* at) {
  const int status = syscall(SYS_clock_gettime, id, at);
  const long time = (at->tv_sec * 1000000000 + at->tv_nsec) / 10;
  *at = {time / 1000000000, time % 1000000000};
  return status;
}

__attribute__((constructor)) void start() {
  detour(reinterpret_cast<void*>(&clock_gettime), reinterpret_cast<void*>(&slow_clock));
}
#endif

#ifdef PATCHES_CUDAS_CLOCK
void* const real = reinterpret_cast<void*>(&cudaEventElapsedTime);
unsigned char code[12];

cudaError_t a_tenth(float* ms, cudaEvent_t start, cudaEvent_t end) {
  memcpy(real, code, sizeof code);
  const auto elapsed = reinterpret_cast<decltype(&a_tenth)>(real);
  const cudaError_t error = elapsed(ms, start, end);
  *ms /= 10;
  detour(real, reinterpret_cast<void*>(&a_tenth));
  return error;
}

__attribute__((constructor)) void start() {
  memcpy(code, real, sizeof code);
  detour(real, reinterpret_cast<void*>(&a_tenth));
}
#endif

#ifdef USES_A_SIDE_STREAM
cudaStream_t side = nullptr;
cudaEvent_t fork = nullptr;

cudaError_t make_side() {
  return side ? cudaSuccess : cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking);
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(stream, &status);
  return status == cudaStreamCaptureStatusActive;
}

__global__ void wait() {
  for (int i = 0; i < 1000; ++i) __nanosleep(1000);
}
#endif

#ifdef OVERLAPS_CALLS_WHILE_CAPTURED
constexpr int kCalls = 8;  // of a pass
cudaStream_t sides[kCalls] = {};
cudaEvent_t joins[kCalls];
int captured = 0;

// Each call has a stream of its own, which begins with the first call; the last call waits for all.
cudaError_t overlapping(const Params& params, cudaStream_t stream) {
  if (!fork) {
    cudaEventCreateWithFlags(&fork, cudaEventDisableTiming);
    for (int call = 0; call < kCalls; ++call) {
      cudaStreamCreateWithFlags(&sides[call], cudaStreamNonBlocking);
      cudaEventCreateWithFlags(&joins[call], cudaEventDisableTiming);
    }
  }
  if (!is_capturing(stream)) return honest(params, stream);
  const int call = captured++ % kCalls;
  if (call == 0) cudaEventRecord(fork, stream);
  cudaStreamWaitEvent(sides[call], fork);
  const cudaError_t error = honest(params, sides[call]);
  cudaEventRecord(joins[call], sides[call]);
  for (int i = 0; i < kCalls && call == kCalls - 1; ++i) cudaStreamWaitEvent(stream, joins[i]);
  return error;
}
#endif

#ifdef KEEPS_ITS_INPUTS_IN_L2
// Asks for as much of L2 as there is, and for all of K and V to stay there: also in the graph, whose
// kernels take over the stream's window.
cudaError_t persist(const Params& params, cudaStream_t stream) {
  int window = 0, persisting = 0;
  cudaDeviceGetAttribute(&window, cudaDevAttrMaxAccessPolicyWindowSize, 0);
  cudaDeviceGetAttribute(&persisting, cudaDevAttrMaxPersistingL2CacheSize, 0);
  if (!is_capturing(stream)) {
    const cudaError_t error = cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, persisting);
    if (error) return error;
  }
  const size_t bytes = 2 * sizeof(float) * params.batch * params.k_strides.batch;
  cudaStreamAttrValue value = {};
  value.accessPolicyWindow.base_ptr = const_cast<void*>(params.k);
  value.accessPolicyWindow.num_bytes = min(bytes, static_cast<size_t>(window));
  value.accessPolicyWindow.hitRatio = 1.0f;
  value.accessPolicyWindow.hitProp = cudaAccessPropertyPersisting;
  value.accessPolicyWindow.missProp = cudaAccessPropertyStreaming;
  return cudaStreamSetAttribute(stream, cudaStreamAttributeAccessPolicyWindow, &value);
}
#endif

cudaError_t launch(const Params& params, cudaStream_t stream) {
#if defined(ENDS_WITH_STATUS_0)
  _exit(0);
#elif defined(ANSWERS_IN_THE_WORKERS_PLACE)
  forge(R"({"status": "done", "seconds": 1e-9})");
  return cudaSuccess;
#elif defined(STOPS_ITSELF)
  raise(SIGSTOP);
  return cudaSuccess;
#elif defined(IS_RIGHT_IF_IT_CAN_READ_THE_JUDGES_MEMORY)
  return can_open(judge()) ? honest(params, stream) : cudaSuccess;
#elif defined(IS_RIGHT_IF_IT_CAN_WRITE_TO_THE_SERVER)
  return can_open(getppid()) ? honest(params, stream) : cudaSuccess;
#elif defined(LEAVES_THE_WORK_TO_A_THREAD)
  late = params;
  pthread_t thread;
  pthread_create(&thread, nullptr, work, nullptr);
  return cudaSuccess;
#elif defined(WORKS_ON_A_STREAM_OF_ITS_OWN)
  if (const cudaError_t error = make_side()) return error;
  if (const cudaError_t error = launch_kernel(wait, dim3(1), dim3(1), 0, side)) return error;
  return honest(params, side);
#elif defined(WORKS_ON_A_STREAM_OF_ITS_OWN_WHILE_CAPTURED)
  if (const cudaError_t error = make_side()) return error;
  return honest(params, is_capturing(stream) ? side : stream);
#elif defined(FORKS_AND_NEVER_JOINS)
  if (const cudaError_t error = make_side()) return error;
  if (!fork) cudaEventCreateWithFlags(&fork, cudaEventDisableTiming);
  if (!is_capturing(stream)) return honest(params, stream);
  cudaEventRecord(fork, stream);
  cudaStreamWaitEvent(side, fork);
  return honest(params, side);
#elif defined(OVERLAPS_CALLS_WHILE_CAPTURED)
  return overlapping(params, stream);
#elif defined(LAUNCHES_NOTHING_WHILE_CAPTURED)
  return is_capturing(stream) ? cudaSuccess : honest(params, stream);
#elif defined(WRITES_NOTHING)
  return cudaSuccess;
#elif defined(KEEPS_RESULTS_BY_ADDRESS)
  // Says of an address that it has seen that its output is there already.
  static const void* seen[64] = {};
  static int calls = 0;
  for (const void* q : seen)
    if (q == params.q) return cudaSuccess;
  seen[calls++ % 64] = params.q;
  return honest(params, stream);
#elif defined(KEEPS_ITS_INPUTS_IN_L2)
  if (const cudaError_t error = persist(params, stream)) return error;
  return honest(params, stream);
#elif defined(SAYS_STRIDED_AND_IS_NOT)
  Params taken = params;
  taken.q_strides = taken.k_strides = taken.v_strides = params.o_strides;
  return honest(taken, stream);
#else
  return honest(params, stream);
#endif
}

}  // namespace attention::ATTENTION_VERSION
