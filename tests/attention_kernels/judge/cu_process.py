"""Version files that play with the worker: its end, its answers, its clock, its CUDA streams."""

from __future__ import annotations

from tests.attention_kernels.judge.cu_cheat import ERROR, Cheat

ENDED = "ended with exit status 0"
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


def timed(body: str) -> str:
    """Code that changes what times calls in the worker."""
    return f"""{PYTHON}
__attribute__((constructor)) void start() {{
  run_python(R"(
import time
from attention_kernels.judge import caller

class Timed(caller._Timed):{body}
caller._Timed = Timed
)");
}}
"""


CHEATS = [
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
        "it ended with exit status 0",
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
        ERROR + "|changed its input|ended|broke off",
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
        "works_before_the_clock_starts",
        "the timed outputs are wrong",
        by="clock",
        on="both",
        code=timed("""
    def renew(self, on_host):
        super().renew(on_host)
        super().run()
        self.kept = [*self._outputs]

    def run(self, passes=1):
        self._outputs = self.kept if hasattr(self, "kept") else super().run() and self._outputs
        return 1e-4 * passes
"""),
    ),
    Cheat(
        "works_after_the_clock_has_stopped",
        "changed after the clock had stopped",
        by="clock",
        on="both",
        code=timed("""
    def run(self, passes=1):
        return 1e-4 * passes if hasattr(self, "_outputs") and self._outputs else super().run()

    def hand_over(self, outputs):
        super().run()
        super().hand_over(outputs)
"""),
    ),
    Cheat(
        "reports_a_tenth",
        "the clocks disagree",
        by="clock",
        code=timed("""
    def run(self, passes=1):
        return super().run(passes) / 10
"""),
    ),
    Cheat(
        "reports_less_once_and_keeps_the_results",
        "the clocks disagree",
        by="clock",
        on="both",
        code=timed("""
    def run(self, passes=1):
        if passes == 1:
            return super().run() / 100
        time.sleep(1e-4 * passes)
        return 1e-4 * passes
"""),
    ),
    Cheat(
        "makes_its_own_times_vary",
        "the clocks disagree",
        by="clock",
        on="both",
        code=timed("""
    runs, samples = 9, 0

    def renew(self, on_host):
        super().renew(on_host)
        self.runs, self.samples = 0, self.samples + 1

    def run(self, passes=1):
        self.runs += 1
        factor = 1 if self.runs > 1 else 1e3 if self.samples == 1 else 5e-2
        return super().run(passes) * factor
"""),
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
