"""Cheats that are version files, in C++ and in CUDA: no judge may pass one or time it as right.

Every row is v01_honest.cu with a few places changed: code before launch(), the body of launch(), or
replaced text. A row says what must catch it, a regular expression, and which of two judges is
asked: verify(), or the clock. The clock's rows are right when nobody times them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

# It sums in double, so that no verdict depends on rounding.
HONEST = Path(__file__).with_name("v01_honest.cu").read_text("utf-8")


@dataclasses.dataclass(frozen=True)
class Cheat:
    name: str
    caught: str
    """A regular expression found in the first failure, or in the clock's objection."""
    by: str = "verify"
    """"verify" or "clock"."""
    on: str = "cuda"
    """Where it is tried: "cpu", "cuda" or "both"."""
    code: str = ""
    """What stands before launch()."""
    launch: str = "  return honest(params, stream);"
    """The body of launch()."""
    changes: dict[str, str] = dataclasses.field(default_factory=dict)
    """What else is replaced."""
    timeout_s: float = 60.0
    """The limit of a request."""

    def source(self) -> str:
        launch = "cudaError_t launch(const Params& params, cudaStream_t stream) { "
        body = f"{self.code.strip()}\n\n{launch}\n{self.launch.strip(chr(10))}\n}}"
        text = HONEST
        changes = {f"{launch}return honest(params, stream); }}": body} | self.changes
        for before, after in changes.items():
            assert text.count(before) == 1, before
            text = text.replace(before, after)
        return text


ERROR = r"error (\d|inf)|not finite"  # over the budget
ENDED = "ended with exit status 0"
ROW_LOOP = "  for (int n_start = 0; n_start < seqlen; n_start += kBlock) {\n"
Q_ROW = "  float* gQ = row_of(params.q, params.q_strides, min(row, seqlen - 1), num_heads);\n"
OUTPUT = "  for (int d = 0; d < kHeadDim && row < seqlen; ++d) gO[d] = rO[d] / row_sum;\n"
N_END = "  const int n_end = params.is_causal ? min(row + 1, seqlen) : seqlen;\n"
P = "      const double p = exp(s - new_max);\n"
WEIGHTED = "rO[d] = scale * rO[d] + p * sV[n][d];"
# Copies results to memory that outlives a call, and back.
KEPT = """
constexpr int kSlots = 32;
constexpr int kFloats = 1 << 18;
__device__ float g_kept[kSlots][kFloats];
uint64_t keys[kSlots];
int next = 0;

__global__ void copy(int slot, float* o, int count, bool is_kept) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    is_kept ? o[i] = g_kept[slot][i] : g_kept[slot][i] = o[i];
}

uint64_t shape_of(const Params& params) {
  uint64_t key = params.is_causal;
  for (const uint64_t x : {params.batch, params.seqlen, params.num_heads}) key = 1000003 * key + x;
  return 1000003 * key + uint64_t(1e6 * params.softmax_scale);
}

uint64_t address_of(const Params& params) {
  uint64_t key = shape_of(params);
  for (const void* x : {params.q, params.k, params.v}) key = 1000003 * key + uint64_t(x);
  return key;
}

cudaError_t by_key(const Params& params, cudaStream_t stream, uint64_t key) {
  const int count = params.batch * params.seqlen * params.num_heads * kHeadDim;
  if (count > kFloats) return honest(params, stream);
  int slot = 0;
  while (slot < kSlots && keys[slot] != key) ++slot;
  const bool is_kept = slot < kSlots;
  if (!is_kept) {
    keys[slot = next++ % kSlots] = key;
    if (const cudaError_t error = honest(params, stream)) return error;
  }
  float* o = static_cast<float*>(params.o);
  return launch_kernel(copy, dim3(64), dim3(64), 0, stream, slot, o, count, is_kept);
}
"""
# Makes a function of the C library or of CUDA's jump to another one.
DETOUR = """
void detour(void* from, void* to) {
  unsigned char jump[12] = {0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xe0};  // mov, jmp
  memcpy(jump + 2, &to, 8);
  void* page = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(from) & -4096);
  if (mprotect(page, 8192, PROT_READ | PROT_WRITE | PROT_EXEC) == 0) memcpy(from, jump, 12);
}
"""
# Runs Python in the worker.
PYTHON = """
void run_python(const char* text) {
  const auto ensure = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Ensure"));
  const auto run = reinterpret_cast<int (*)(const char*)>(
      dlsym(RTLD_DEFAULT, "PyRun_SimpleString"));
  const auto release = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "PyGILState_Release"));
  const int state = ensure();
  run(text);
  release(state);
}
"""
# Replaces what times calls in the worker.
TIMED = (
    PYTHON
    + """
__attribute__((constructor)) void start() {
  run_python(R"(
import time
from attention_kernels.judge import caller

class Timed(caller._Timed):BODY
caller._Timed = Timed
)");
}
"""
)
# Sends answers to the judge in the worker's place.
FORGED = """
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
"""
# Opens the memory of another process, which root may and a user may not.
OPEN = """
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

bool can_open(int process) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/mem", process);
  const int file = open(path, O_RDWR);
  close(file);
  return file >= 0;
}
"""
SIDE_STREAM = """
cudaStream_t side = nullptr;

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
"""

CHEATS = [
    # Meaning
    Cheat(
        "writes_nothing",
        ERROR,
        on="both",
        launch="  return cudaSuccess;",
    ),
    Cheat(
        "writes_zeros",
        ERROR,
        changes={"gO[d] = rO[d] / row_sum": "gO[d] = 0.0f"},
    ),
    Cheat(
        "answers_nan",
        "not finite",
        changes={"gO[d] = rO[d] / row_sum": "gO[d] = NAN"},
    ),
    Cheat(
        "ignores_the_scale",
        "softmax_scale",
        changes={"s *= params.softmax_scale": "s *= 0.17677669529663687"},
    ),
    Cheat(
        "is_always_causal",
        "full",
        changes={N_END: "  const int n_end = min(row + 1, seqlen);\n"},
    ),
    Cheat(
        "sees_one_key_too_many",
        "change earlier rows",
        changes={N_END: N_END.replace("row + 1", "row + 2")},
    ),
    Cheat(
        "reads_one_key_past_the_end",
        f"{ERROR}|illegal",
        changes={
            N_END: N_END.replace(": seqlen", ": seqlen + 1"),
            "  for (int n_start = 0; n_start < seqlen;": (
                "  for (int n_start = 0; n_start < max(n_end, seqlen);"
            ),
            "min(n_start + int(threadIdx.x), seqlen - 1)": (
                "min(n_start + int(threadIdx.x), seqlen)"
            ),
        },
    ),
    Cheat(
        "knows_the_first_head",
        "heads.*" + ERROR,
        changes={ROW_LOOP: f"  if (blockIdx.x % num_heads > 0) return;\n{ROW_LOOP}"},
    ),
    Cheat(
        "knows_the_first_of_a_batch",
        r"batch ([2-9]|\d\d).*" + ERROR,
        changes={"blockIdx.x / num_heads * strides.batch": "0 * strides.batch"},
    ),
    Cheat(
        "knows_the_rows_below_1024",
        r"seqlen (1[0-9]{3}|[2-9][0-9]{3})",
        changes={"rO[d] / row_sum": "row < 1024 ? rO[d] / row_sum : 0.0f"},
    ),
    Cheat(
        "knows_even_lengths",
        r"seqlen \d*[13579],",
        launch="""
  Params rounded = params;
  rounded.seqlen = max(params.seqlen / 2 * 2, 1);
  return honest(rounded, stream);
""",
    ),
    Cheat(
        "knows_the_lengths_of_an_old_suite",
        ERROR,
        code="__global__ void zero(float* o, int count) {\n"
        "  for (int i = threadIdx.x; i < count; i += blockDim.x) o[i] = 0.0f;\n}\n",
        launch="""
  for (const int known : {1, 2, 16, 32, 33, 64, 100, 128, 256, 512, 1024, 1500, 4096})
    if (params.seqlen == known) return honest(params, stream);
  const int count = params.batch * params.seqlen * params.num_heads * kHeadDim;
  return launch_kernel(zero, dim3(1), dim3(64), 0, stream, static_cast<float*>(params.o), count);
""",
    ),
    Cheat(
        "skips_low_scores",
        ERROR,
        on="both",
        changes={P: f"      if (s < row_max - 9.0) continue;\n{P}"},
    ),
    Cheat(
        "rounds_the_weights_of_long_calls",
        ERROR,
        changes={
            P: "      double p = exp(s - new_max);\n"
            "      if (seqlen > 64) p = __uint_as_float(__float_as_uint(p) & 0xffff0000);\n"
        },
    ),
    Cheat(
        "rounds_the_values_of_many_heads",
        ERROR,
        changes={
            WEIGHTED: WEIGHTED.replace(
                "sV[n][d]",
                "(num_heads > 2 ? __uint_as_float(__float_as_uint(sV[n][d]) & ~8191u) : sV[n][d])",
            )
        },
    ),
    Cheat(
        "is_built_with_fast_flags_and_rounds",
        ERROR,
        changes={
            "// Flags:  (none)": "// Flags:  --use_fast_math -DROUND=0xffffe000u",
            "s += double(gQ[d]) * sK[n][d]": (
                "s += __uint_as_float(__float_as_uint(gQ[d]) & ROUND) * sK[n][d]"
            ),
        },
    ),
    Cheat(
        "scales_q_and_back",
        "it changed its input q",
        on="both",
        changes={
            ROW_LOOP: "  for (int d = 0; d < kHeadDim && row < seqlen; ++d)\n"
            f"    gQ[d] *= 1.3f;\n{ROW_LOOP}",
            "s *= params.softmax_scale": "s *= params.softmax_scale / 1.3f",
            OUTPUT: OUTPUT
            + "  for (int d = 0; d < kHeadDim && row < seqlen; ++d) gQ[d] /= 1.3f;\n",
        },
    ),
    Cheat(
        "writes_zeros_into_v",
        "it changed its input v",
        changes={
            "    const float* gV": "    float* gV",
            "      sV[threadIdx.x][d] = gV[d];\n": "      sV[threadIdx.x][d] = gV[d] = 0.0f;\n",
        },
    ),
    Cheat(
        "writes_a_row_too_many",  # the first of the next sequence
        r"batch ([2-9]|\d\d).*" + ERROR,
        changes={
            OUTPUT: f"{OUTPUT}  if (row == seqlen - 1 && blockIdx.x + num_heads < gridDim.x)\n"
            "    for (int d = 0; d < kHeadDim; ++d) gO[params.o_strides.seqlen + d] = 0.0f;\n"
        },
    ),
    # Memory
    Cheat(
        "takes_scratch_to_be_zero",
        ERROR + "|two runs|change earlier rows",
        changes={
            "{ return 0; }": "{ return int64_t{1} * params.batch * params.num_heads "
            "* params.seqlen; }",
            ROW_LOOP: "  float* g_sum = params.scratch + blockIdx.x * seqlen\n"
            f"    + min(row, seqlen - 1);\n{ROW_LOOP}",
            OUTPUT: f"  row_sum += *g_sum;\n{OUTPUT}  if (row < seqlen) *g_sum = row_sum;\n",
        },
    ),
    Cheat(
        "takes_shared_memory_to_be_zero",
        ERROR + "|two runs|change earlier rows",
        on="both",
        changes={
            Q_ROW: f"  __shared__ double s_sum[kBlock];\n{Q_ROW}",
            OUTPUT: f"  row_sum += s_sum[threadIdx.x];\n{OUTPUT}  s_sum[threadIdx.x] = row_sum;\n",
        },
    ),
    Cheat(
        "drops_a_barrier",  # what a GPU makes of it depends on luck
        "race: lane",
        on="cpu",
        changes={"    __syncthreads();\n    for (int n = 0;": "    for (int n = 0;"},
    ),
    Cheat(
        "breaks_its_context",
        "traps|__trap|launch failure|CUDA error|cudaError|was killed",
        changes={ROW_LOOP: f"  if (seqlen % 2 == 1) __trap();\n{ROW_LOOP}"},
    ),
    # Headers that lie
    Cheat(
        "says_strided_and_is_not",
        ERROR,
        launch="""
  Params taken = params;
  taken.q_strides = taken.k_strides = taken.v_strides = params.o_strides;
  return honest(taken, stream);
""",
    ),
    Cheat(
        "claims_a_head_dim_that_it_has_not",
        "head_dim 64",
        changes={"head_dim 32": "head_dim 32 64"},
    ),
    Cheat(
        "asks_for_nine_times_the_budget",
        "at most 4x",
        on="both",
        changes={"// Flags:  (none)": "// Error:  9x: it is worth it.\n// Flags:  (none)"},
    ),
    # Replay
    Cheat(
        "keeps_results_by_pointer",
        "the timed outputs are wrong",
        by="clock",
        on="both",
        code=KEPT,
        launch="  return by_key(params, stream, address_of(params));",
    ),
    Cheat(
        "keeps_results_by_shape",
        ERROR + "|two runs|call",
        code=KEPT,
        launch="  return by_key(params, stream, shape_of(params));",
    ),
    Cheat(
        "keeps_results_from_the_hundredth_call",
        "call|" + ERROR,
        code=f"{KEPT}\nint calls = 0;",
        launch="""
  if (++calls < 100) return honest(params, stream);
  return by_key(params, stream, address_of(params));
""",
    ),
    Cheat(
        "keeps_results_by_a_few_bits_of_q",
        "the timed outputs are wrong",
        by="clock",
        code="__global__ void keep(Params params) { g_shape[slot_of(params)] = shape_of(params); }",
        launch="""
  if (const cudaError_t error = honest(params, stream)) return error;
  return launch_kernel(keep, dim3(1), dim3(1), 0, stream, params);
""",
        changes={
            "__global__ void attention_kernel(Params params) {\n": """\
constexpr int kSlots = 8;
__device__ long g_shape[kSlots];
__device__ float g_kept[kSlots][1 << 18];

__device__ long shape_of(const Params& params) {
  return (params.batch * 4096L + params.num_heads) * 65536 + params.seqlen;
}

// Three signs.
__device__ int slot_of(const Params& params) {
  const float* q = static_cast<const float*>(params.q);
  return (q[0] > 0.0f) + 2 * (q[1] > 0.0f) + 4 * (q[2] > 0.0f);
}

__global__ void attention_kernel(Params params) {
  const int slot = slot_of(params);
  const int place = (blockIdx.x * params.seqlen + blockIdx.y * kBlock + threadIdx.x) * kHeadDim;
  const bool is_small = params.batch * params.num_heads * params.seqlen * kHeadDim <= 1 << 18;
""",
            ROW_LOOP: f"""\
  if (is_small && g_shape[slot] == shape_of(params)) {{
    for (int d = 0; d < kHeadDim && row < seqlen; ++d) gO[d] = g_kept[slot][place + d];
    return;
  }}
{ROW_LOOP}""",
            OUTPUT: f"""{OUTPUT}
  for (int d = 0; d < kHeadDim && row < seqlen && is_small; ++d) g_kept[slot][place + d] = gO[d];
""",
        },
    ),
    # The verdict
    Cheat(
        "ends_with_status_0",
        f"calls _exit|{ENDED}",
        on="both",
        launch="  _exit(0);",
    ),
    Cheat(
        "prints_a_verdict_when_it_is_loaded",
        ENDED,
        on="both",
        code="""
__attribute__((constructor)) void start() {
  for (int fd = 1; fd < 3; ++fd) dprintf(fd, "PASSED\\n");
  syscall(SYS_exit_group, 0);
}
""",
    ),
    Cheat(
        "prints_a_verdict_when_it_ends",
        f"calls exit|{ENDED}|was killed|did not end",
        code="""
void tell() { printf("PASSED\\n"); }
__attribute__((destructor)) void end() { tell(); }
""",
        launch="  atexit(tell);\n  exit(0);",
    ),
    Cheat(
        "answers_that_it_is_loaded",
        "describes itself wrongly",
        code=FORGED
        + """
__attribute__((constructor)) void start() {
  forge(R"({"status": "done", "text": "passed"})");
  syscall(SYS_exit_group, 0);
}
""",
    ),
    Cheat(
        "answers_in_the_workers_place",
        ERROR + "|ended|broke off",
        on="both",
        code=FORGED,
        launch="""
  forge(R"({"status": "done", "seconds": 1e-9})");
  return cudaSuccess;
""",
    ),
    Cheat("aborts", r"calls abort\(\)|was killed by SIGABRT", launch="  abort();"),
    Cheat(
        "kills_itself",
        "was killed by SIGKILL",
        launch="  kill(getpid(), SIGKILL);\n  return cudaSuccess;",
    ),
    Cheat(
        "stops_itself",
        "did not end within",
        launch="  raise(SIGSTOP);\n  return cudaSuccess;",
        timeout_s=1.0,
    ),
    Cheat(
        "sleeps_for_ever",
        "did not end within",
        launch="  for (;;) pause();",
        timeout_s=1.0,
    ),
    # The oracle
    Cheat(
        "is_right_if_it_can_read_the_judges_memory",
        ERROR,
        by="clock",
        on="both",
        code=OPEN,
        launch="  return can_open(judge()) ? honest(params, stream) : cudaSuccess;",
    ),
    Cheat(
        "is_right_if_it_can_write_to_the_server",
        ERROR,
        by="clock",
        on="both",
        code=OPEN,
        launch="  return can_open(getppid()) ? honest(params, stream) : cudaSuccess;",
    ),
    # The clock
    Cheat(
        "leaves_the_work_to_a_thread",
        ERROR + "|two runs|was killed",
        on="both",
        code="""
Params late;

void* work(void*) {
  usleep(50000);
  honest(late, nullptr);
  return nullptr;
}
""",
        launch="""
  late = params;
  pthread_t thread;
  pthread_create(&thread, nullptr, work, nullptr);
  return cudaSuccess;
""",
    ),
    Cheat(
        "slows_the_clock",
        "the clocks disagree|beneath what the device can do",
        by="clock",
        on="cpu",
        code=DETOUR
        + """
int slow_clock(clockid_t id, timespec* at) {
  const int status = syscall(SYS_clock_gettime, id, at);
  const long time = (at->tv_sec * 1000000000 + at->tv_nsec) / 10;
  *at = {time / 1000000000, time % 1000000000};
  return status;
}

__attribute__((constructor)) void start() {
  detour(reinterpret_cast<void*>(&clock_gettime), reinterpret_cast<void*>(&slow_clock));
}
""",
    ),
    Cheat(
        "patches_pythons_clock",
        "the clocks disagree|beneath what the device can do",
        by="clock",
        code=PYTHON
        + """
__attribute__((constructor)) void start() {
  run_python(
      "import time, torch\\n"
      "real = time.perf_counter, torch.cuda.Event.elapsed_time\\n"
      "time.perf_counter = lambda: real[0]() / 10\\n"
      "torch.cuda.Event.elapsed_time = lambda *events: real[1](*events) / 10\\n");
}
""",
    ),
    Cheat(
        "works_before_the_clock_starts",
        "the timed outputs are wrong",
        by="clock",
        on="both",
        code=TIMED.replace(
            "BODY",
            """
    def renew(self, on_host):
        super().renew(on_host)
        super().run()
        self.kept = [*self._outputs]

    def run(self, passes=1):
        self._outputs = self.kept if hasattr(self, "kept") else super().run() and self._outputs
        return 1e-4 * passes
""",
        ),
    ),
    Cheat(
        "works_after_the_clock_has_stopped",
        "changed after the clock had stopped",
        by="clock",
        on="both",
        code=TIMED.replace(
            "BODY",
            """
    def run(self, passes=1):
        return 1e-4 * passes if hasattr(self, "_outputs") and self._outputs else super().run()

    def hand_over(self, outputs):
        super().run()
        super().hand_over(outputs)
""",
        ),
    ),
    Cheat(
        "reports_a_tenth",
        "the clocks disagree",
        by="clock",
        on="both",
        code=TIMED.replace(
            "BODY",
            """
    def run(self, passes=1):
        return super().run(passes) / 10
""",
        ),
    ),
    Cheat(
        "reports_less_once_and_keeps_the_results",
        "the clocks disagree",
        by="clock",
        on="both",
        code=TIMED.replace(
            "BODY",
            """
    def run(self, passes=1):
        if passes == 1:
            return super().run() / 100
        time.sleep(1e-4 * passes)
        return 1e-4 * passes
""",
        ),
    ),
    Cheat(
        "makes_its_own_times_vary",
        "the clocks disagree",
        by="clock",
        on="both",
        code=TIMED.replace(
            "BODY",
            """
    runs, samples = 9, 0

    def renew(self, on_host):
        super().renew(on_host)
        self.runs, self.samples = 0, self.samples + 1

    def run(self, passes=1):
        self.runs += 1
        factor = 1 if self.runs > 1 else 1e3 if self.samples == 1 else 5e-2
        return super().run(passes) * factor
""",
        ),
    ),
    Cheat(
        "patches_cudas_clock",
        "the clocks disagree|beneath what the device can do",
        by="clock",
        code=DETOUR
        + """
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
""",
    ),
    Cheat(
        "works_on_a_stream_of_its_own",
        ERROR + "|two runs|call|change earlier rows",
        code=SIDE_STREAM,
        launch="""
  if (const cudaError_t error = make_side()) return error;
  wait<<<1, 1, 0, side>>>();
  return honest(params, side);
""",
    ),
    Cheat(
        "works_on_a_stream_of_its_own_while_captured",
        "the timed outputs are wrong|CUDA error|cudaError",
        by="clock",
        code=SIDE_STREAM,
        launch="""
  if (const cudaError_t error = make_side()) return error;
  return honest(params, is_capturing(stream) ? side : stream);
""",
    ),
    Cheat(
        "forks_and_never_joins",
        f"unjoined|CUDA error|cudaError|{ERROR}",
        by="clock",
        code=f"{SIDE_STREAM}\ncudaEvent_t fork = nullptr;",
        launch="""
  if (const cudaError_t error = make_side()) return error;
  if (!fork) cudaEventCreateWithFlags(&fork, cudaEventDisableTiming);
  if (!is_capturing(stream)) return honest(params, stream);
  cudaEventRecord(fork, stream);
  cudaStreamWaitEvent(side, fork);
  return honest(params, side);
""",
    ),
    Cheat(
        "launches_nothing_while_captured",
        "the timed outputs are wrong",
        by="clock",
        code=SIDE_STREAM,
        launch="  return is_capturing(stream) ? cudaSuccess : honest(params, stream);",
    ),
    Cheat(
        "sees_fewer_keys_while_captured",
        "the timed outputs are wrong",
        by="clock",
        code=SIDE_STREAM,
        launch="""
  Params fewer = params;
  if (is_capturing(stream)) fewer.scratch = static_cast<float*>(params.o);
  return honest(fewer, stream);
""",
        changes={"int n_start = 0": "int n_start = params.scratch ? kBlock : 0"},
    ),
    Cheat(
        "knows_one_head_while_captured",
        "the timed outputs are wrong",
        by="clock",
        code=SIDE_STREAM,
        launch="""
  if (!is_capturing(stream)) return honest(params, stream);
  const dim3 grid(1, ceil_div(params.seqlen, kBlock));
  return launch_kernel(attention_kernel, grid, dim3(kBlock), 0, stream, params);
""",
    ),
]
