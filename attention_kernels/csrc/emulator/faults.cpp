// A fault in a kernel ends its launch, not the process, with an error that names block, thread and
// line: wild and misaligned accesses, indices out of bounds, failed assertions, exit(), blocks that
// do not end, and Ctrl-C.
//
// Faults arrive in three ways. The compiler inserts checks of indices, bounds of known arrays and
// alignment into the kernel (-fsanitize=bounds,object-size,alignment), which call the handlers
// below instead of the sanitizer's library. The linker redirects the kernel's calls of exit(),
// abort() and assert()'s failure function (--wrap). The rest are signals: faults and ticks. A loop
// without a barrier never yields, so each OS thread that runs blocks gets a signal every 50 ms,
// whose handler ends the block if its time is up or Ctrl-C was pressed.

namespace attention::emulator {

constexpr long kTickNanoseconds = 50'000'000;
constexpr double kTicksPerSecond = 1e9 / kTickNanoseconds;

std::string place(uintptr_t code) {
  Dl_info library{};
  dladdr(reinterpret_cast<void*>(code), &library);
  return format(", in code at +{} of {}", hexadecimal(offset(code, library.dli_fbase)),
                library.dli_fname ? library.dli_fname : "an unknown library");
}

// ---- The compiler's checks ----------------------------------------------------------------------

// What GCC and Clang pass to UndefinedBehaviorSanitizer begins like this: of an access, or of an
// index, with the type of the array.
struct Check {
  const char* file;
  uint32_t line, column;
  const struct {
    uint16_t kind, info;
    char name[1];  // in quotes
  }* type;
  unsigned char log_alignment;  // only of an access

  std::string at() const { return place(file, int(line)); }
};

extern "C" {

[[noreturn]] __attribute__((used)) inline void __ubsan_handle_type_mismatch_v1_abort(
    const Check* check, uintptr_t address) {
  const uintptr_t alignment = uintptr_t{1} << check->log_alignment;
  if (address % alignment != 0)
    fail(cudaErrorMisalignedAddress,
         format("misaligned access at {}: a {} that is not at a multiple of {} bytes", check->at(),
                check->type->name, alignment));
  fail(cudaErrorIllegalAddress, format("access out of bounds of an array at {}: no room for a {}",
                                       check->at(), check->type->name));
}

[[noreturn]] __attribute__((used)) inline void __ubsan_handle_out_of_bounds_abort(
    const Check* check, intptr_t index) {
  fail(cudaErrorIllegalAddress, format("access out of bounds of an array at {}: index {} of a {}",
                                       check->at(), index, check->type->name));
}

// ---- Functions that the linker redirects --------------------------------------------------------

[[noreturn]] __attribute__((used)) inline void __wrap_exit(int status) {
  fail(cudaErrorLaunchFailure, format("the version file calls exit({})", status));
}

[[noreturn]] __attribute__((used)) inline void __wrap__exit(int status) {
  fail(cudaErrorLaunchFailure, format("the version file calls _exit({})", status));
}

[[noreturn]] __attribute__((used)) inline void __wrap_abort() {
  fail(cudaErrorLaunchFailure, "the version file calls abort()");
}

[[noreturn]] __attribute__((used)) inline void __wrap___assert_fail(const char* condition,
                                                                    const char* file, unsigned line,
                                                                    const char*) {
  fail(cudaErrorAssert, format("assert() at {}: {}", place(file, int(line)), condition));
}

}  // extern "C"

// ---- Signals ------------------------------------------------------------------------------------

// Keyboard interrupts. This is the only state that all libraries share, because a process has one
// SIGINT handler: GCC makes an inline variable of default visibility unique in the process.
struct Interrupts {
  std::mutex mutex;
  unsigned launches = 0;  // those running
  std::atomic<unsigned> count{0};
  struct sigaction ours{}, previous{};
};
inline __attribute__((visibility("default"))) Interrupts interrupts;

#ifdef __x86_64__
inline auto& code_of(mcontext_t& machine) { return machine.gregs[REG_RIP]; }
inline auto& stack_pointer_of(mcontext_t& machine) { return machine.gregs[REG_RSP]; }
#else
inline auto& code_of(mcontext_t& machine) { return machine.pc; }
inline auto& stack_pointer_of(mcontext_t& machine) { return machine.sp; }
#endif

// Makes a fiber continue in `function`, with an empty stack, when the signal handler returns.
inline void redirect(mcontext_t& machine, Fiber& fiber, void (*function)()) {
#ifdef ATTENTION_EMULATOR_ASAN
  __asan_unpoison_memory_region(fiber.bottom, fiber.size);
#endif
  code_of(machine) = reinterpret_cast<uintptr_t>(function);
  stack_pointer_of(machine) = reinterpret_cast<uintptr_t>(&fiber) - kEntryOffset;
}

inline Block* block_of(mcontext_t& machine) {
  return Blocks::instance().of(static_cast<uintptr_t>(stack_pointer_of(machine)));
}

inline struct sigaction previous_actions[65];

inline bool is_function(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 ||
         (action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN);
}

// Calls the previous handler; returns false if there was none.
inline bool pass_on(const struct sigaction& to, int signal, siginfo_t* info, void* context) {
  if (!is_function(to)) return false;
  if ((to.sa_flags & SA_SIGINFO) != 0) {
    to.sa_sigaction(signal, info, context);
  } else {
    to.sa_handler(signal);
  }
  return true;
}

inline void handle(int signal, void (*handler)(int, siginfo_t*, void*), int flags = 0) {
  struct sigaction action{};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | flags;
  sigaction(signal, &action, &previous_actions[signal]);
}

// A fiber continues here after a fault, on its own stack again.
[[noreturn]] inline void after_fault() {
  const Block& block = *this_fiber().block;
  const siginfo_t& fault = block.signals.fault;
  const auto address = reinterpret_cast<uintptr_t>(fault.si_addr);
  const std::string at = place(block.signals.code);
  const std::string there = format(" (address {}){}", hexadecimal(address), at);
  if (fault.si_signo == SIGFPE) fail(cudaErrorLaunchFailure, "integer division by zero" + at);
  if (fault.si_signo == SIGILL) fail(cudaErrorLaunchFailure, "the kernel traps" + at);
  if (block.owns(address)) fail(cudaErrorLaunchFailure, "stack overflow" + there);
  if (fault.si_signo == SIGBUS || fault.si_code == SI_KERNEL)
    fail(cudaErrorMisalignedAddress, "access of a misaligned or wild address" + there);
  if (block.shared.is_near(address))
    fail(cudaErrorIllegalAddress,
         "illegal access to " + describe(block.shared, fault.si_addr) + at);
  fail(cudaErrorIllegalAddress, "illegal memory access" + there);
}

// A wild address in a kernel is an error of the launch, as on a GPU, and does not end the process.
// Faults elsewhere go to the previous handler. AddressSanitizer keeps its own handlers; its report
// gets the CUDA thread at fault.
#ifdef ATTENTION_EMULATOR_ASAN
inline void catch_faults() {
  __asan_set_error_report_callback([](const char*) {
    if (const Block* const block = this_block()) {
      std::fprintf(stderr, "emulated CUDA block %s, thread %s\n", text(block->index).c_str(),
                   text(this_fiber().thread_idx).c_str());
    }
  });
}
#else
inline void on_fault(int signal, siginfo_t* info, void* context) {
  auto& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
  Block* const block = block_of(machine);
  if (block != nullptr && !std::exchange(block->signals.faulted, true)) {
    block->signals.fault = *info;
    block->signals.code =
        block->access != 0 ? block->access - 1 : static_cast<uintptr_t>(code_of(machine));
    redirect(machine, *block->warp->fibers[block->lane], &after_fault);
  } else if (!pass_on(previous_actions[signal], signal, info, context)) {
    sigaction(signal, &previous_actions[signal], nullptr);  // the instruction faults again
  }
}

inline void catch_faults() {
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) handle(signal, on_fault);
}
#endif

// ---- Time and Ctrl-C ----------------------------------------------------------------------------

inline bool is_late(const Block& block) {
  const unsigned limit = block.launch->tick_limit;
  return limit != 0 && block.signals.ticks > limit;
}

// Called at each tick: returns whether the fiber that runs this code must end now. In other
// libraries' code it may hold a lock (malloc's, say) and gets until the next tick; a fiber that is
// already failing ends by itself.
inline bool must_stop(Block& block, uintptr_t code) {
  Signals& signals = block.signals;
  ++signals.ticks;
  const Library& library = Library::instance();
  if (!is_late(block) && interrupts.count == block.launch->interrupts) return false;
  if (signals.stopped || block.error != cudaSuccess || code - library.code >= library.code_bytes) {
    return false;
  }
  signals.code = block.access != 0 ? block.access - 1 : code;
  return signals.stopped = true;
}

// A fiber that must end continues here, on its own stack.
[[noreturn]] inline void after_stop() {
  Block& block = *this_fiber().block;
  std::string where = place(block.signals.code);
  if (block.interval + block.arrived > 0)
    where += format(", the last barrier was {}", block.barrier);
  if (!is_late(block)) fail(cudaErrorLaunchFailure, "interrupted" + where);
  char what[64];
  std::snprintf(what, sizeof what, "the block did not end in %g s",
                block.launch->tick_limit / kTicksPerSecond);
  fail(cudaErrorLaunchTimeout, what + where);
}

// The tick signal, which nothing else is likely to use. Each library handles those of its fibers.
inline int tick_signal() { return SIGRTMAX - 5; }

inline void on_tick(int signal, siginfo_t* info, void* context) {
  auto& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
  Block* const block = block_of(machine);
  if (block == nullptr) {
    pass_on(previous_actions[signal], signal, info, context);
  } else if (must_stop(*block, static_cast<uintptr_t>(code_of(machine)))) {
    const auto stack_pointer = static_cast<uintptr_t>(stack_pointer_of(machine));
    redirect(machine, fiber_on(stack_pointer & ~(kStackBytes - 1)), &after_stop);
  }
}

// While this exists, the calling OS thread gets ticks. Uses system calls, because older C libraries
// have these functions in a separate library and no name for a per-thread timer.
struct Ticker {
  int timer = 0;

  Ticker() {
    sigevent event{};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = tick_signal();
    event._sigev_un._tid = static_cast<pid_t>(syscall(SYS_gettid));
    if (syscall(SYS_timer_create, CLOCK_MONOTONIC, &event, &timer) != 0)
      throw std::system_error(errno, std::generic_category(), "timer_create");
    const itimerspec every{{0, kTickNanoseconds}, {0, kTickNanoseconds}};
    syscall(SYS_timer_settime, timer, 0, &every, nullptr);
  }
  ~Ticker() { syscall(SYS_timer_delete, timer); }
  Ticker(const Ticker&) = delete;
};

inline void on_interrupt(int signal, siginfo_t* info, void* context) {
  ++interrupts.count;
  pass_on(interrupts.previous, signal, info, context);
}

// While one exists, in any library, interrupts are counted and passed on to their handler. Without
// a handler they are not counted: they end the process or are ignored, as before.
struct InterruptCounter {
  InterruptCounter() {
    const std::lock_guard<std::mutex> lock(interrupts.mutex);
    if (interrupts.launches++ != 0) return;
    struct sigaction now{};
    sigaction(SIGINT, nullptr, &now);
    if (!is_function(now) || is_ours(now)) return;
    interrupts.previous = interrupts.ours = now;
    interrupts.ours.sa_sigaction = on_interrupt;
    interrupts.ours.sa_flags |= SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGINT, &interrupts.ours, nullptr);
  }
  ~InterruptCounter() {
    const std::lock_guard<std::mutex> lock(interrupts.mutex);
    if (--interrupts.launches != 0) return;
    struct sigaction now{};
    sigaction(SIGINT, nullptr, &now);
    if (is_ours(now)) sigaction(SIGINT, &interrupts.previous, nullptr);
  }
  InterruptCounter(const InterruptCounter&) = delete;

  static bool counts() { return interrupts.ours.sa_sigaction != nullptr; }

  static bool is_ours(const struct sigaction& action) {
    return is_function(action) && action.sa_sigaction == interrupts.ours.sa_sigaction;
  }
};

// While this exists, signal handlers run on their own stack: a fiber's may have overflowed.
struct SignalStack {
  stack_t previous{};

  explicit SignalStack(Block& block) {
    stack_t stack{};
    stack.ss_sp = block.signal_stack;
    stack.ss_size = sizeof block.signal_stack;
    sigaltstack(&stack, &previous);
  }
  ~SignalStack() { sigaltstack(&previous, nullptr); }
  SignalStack(const SignalStack&) = delete;
};

}  // namespace attention::emulator
