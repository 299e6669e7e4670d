// The grid: a launch's settings and checks, and its blocks, run by several OS threads.

namespace attention::emulator {

constexpr double kTimeout = 60;  // default, in seconds per block

// ---- Settings -----------------------------------------------------------------------------------

const char* setting(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

// The number in a setting, or 0 if it is not one from 1 to 1024.
inline int number(const char* name, int default_value) {
  const char* const value = setting(name);
  if (value == nullptr) return default_value;
  char* end = nullptr;
  const long found = std::strtol(value, &end, 10);
  return *end == '\0' && found >= 1 && found <= 1024 ? static_cast<int>(found) : 0;
}

Device Device::emulated() {
  const int arch = number("ATTENTION_EMULATOR_ARCH", 90);
  const int multiprocessors = number("ATTENTION_EMULATOR_MULTIPROCESSORS", 8);
  constexpr int kKilobytes[][2] = {{70, 96}, {75, 64},  {80, 163},  {86, 99},   {87, 163},
                                   {89, 99}, {90, 227}, {100, 227}, {103, 227}, {120, 99}};
  for (const auto& [known, kilobytes] : kKilobytes)
    if (arch == known) return {arch, size_t(kilobytes) * 1024, multiprocessors};
  return {arch, 0, multiprocessors};
}

// Reads the environment into the launch. Returns a complaint about it, or "".
inline std::string read_settings(Launch& launch, uint64_t& workers) {
  std::string wrong;
  // parse(value, end) sets `end` to what it has not parsed, and returns whether the value is
  // possible.
  const auto read = [&](const char* name, const char* expected, auto parse) {
    const char* const value = setting(name);
    const char* end = "";
    if (wrong.empty() && value != nullptr &&
        (!parse(value, const_cast<char**>(&end)) || *end != '\0'))
      wrong = format("{} is `{}`: it takes {}", name, value, expected);
  };
  const Device device = Device::emulated();
  launch.arch = device.arch;
  launch.shared_limit = device.shared_limit;
  launch.tick_limit = static_cast<unsigned>(kTimeout * kTicksPerSecond);
  workers = std::thread::hardware_concurrency();
  read("ATTENTION_EMULATOR_ARCH", "70, 75, 80, 86, 87, 89, 90, 100, 103 or 120",
       [&](const char*, char**) { return device.shared_limit != 0; });
  read("ATTENTION_EMULATOR_MULTIPROCESSORS", "a number of multiprocessors, 1 to 1024",
       [&](const char*, char**) { return device.multiprocessors != 0; });
  read("ATTENTION_EMULATOR_POISON", "a hexadecimal word", [&](const char* value, char** end) {
    const unsigned long word = std::strtoul(value, end, 16);
    launch.poison = static_cast<uint32_t>(word);
    return *value != '-' && word == launch.poison;
  });
  read("ATTENTION_EMULATOR_ORDER", "reverse or shuffle:<seed>", [&](const char* value, char** end) {
    if (std::strncmp(value, "shuffle:", 8) == 0 && value[8] >= '0' && value[8] <= '9') {
      launch.order = Launch::kShuffle;
      launch.seed = std::strtoull(value + 8, end, 10);
      return true;
    }
    launch.order = Launch::kReverse;
    return std::strcmp(value, "reverse") == 0;
  });
  read("ATTENTION_EMULATOR_TIMEOUT", "a number of seconds, or 0 for no limit",
       [&](const char* value, char** end) {
         const double ticks = std::strtod(value, end) * kTicksPerSecond;
         const bool is_possible = ticks >= 0 && ticks < 1e9;
         if (is_possible) launch.tick_limit = static_cast<unsigned>(std::ceil(ticks));
         return is_possible;
       });
  read("ATTENTION_EMULATOR_THREADS", "a number of OS threads", [&](const char* value, char** end) {
    workers = std::strtoul(value, end, 10);
    return workers != 0 && *value != '-';
  });
  return wrong;
}

// Returns a complaint about the environment, or "".
std::string wrong_setting() {
  Launch launch{};
  uint64_t workers;
  return read_settings(launch, workers);
}

// ---- Blocks -------------------------------------------------------------------------------------

// Returns how many blocks of a launch the device runs at once.
inline uint64_t resident_blocks_of(const Launch& launch) {
  const Device device = Device::emulated();
  return device.multiprocessors *
         device.blocks_at_once(count_in(launch.block), launch.dynamic_shared);
}

// The order in which blocks start. CUDA promises none, so a kernel whose blocks depend on each
// other is wrong in one of these. Ascending unless ATTENTION_EMULATOR_ORDER says otherwise.
struct BlockOrder {
  uint64_t blocks, step = 1, offset = 0;

  BlockOrder(const Launch& launch, uint64_t count) : blocks(count) {
    if (launch.order == Launch::kReverse) {
      step = offset = blocks - 1;
    } else if (launch.order == Launch::kShuffle) {
      const uint64_t hash = (launch.seed + 1) * 0x9e3779b97f4a7c15u;
      offset = hash % blocks;
      step = (hash >> 20) % blocks;
      while (std::gcd(step, blocks) != 1) ++step;
    }
  }

  uint64_t operator[](uint64_t place) const {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(place) * step + offset) % blocks);
  }
};

// Of blocks that all run at once and are checked for races, one runs at a time, in an order that
// only the seed decides. The first in line runs until it waits or, now and then, has changed a word
// that others may read; then it goes to the end of the line. One block is left out until all others
// wait: who does not wait for it is ahead then.
class Turns {
 public:
  Turns(uint64_t blocks, uint64_t seed) : missing(blocks), random(seed) {}

  void begin(Block& block) {
    std::unique_lock<std::mutex> lock(mutex);
    if (has_given_up) return;
    line.push_back(&block);
    if (--missing == 0) {
      std::sort(line.begin(), line.end(), [](auto* a, auto* b) { return a->number < b->number; });
      for (size_t i = line.size(); i > 1; --i)
        std::swap(line[i - 1], line[next_random(random) % i]);
      if (line.size() > 2) leave_out_last();
      call_next();
    }
    wait(block, lock);
  }
  void pass(Block& block, bool waits) {
    std::unique_lock<std::mutex> lock(mutex);
    if (line.empty() && left_out == nullptr) return;
    in_vain = waits ? in_vain + 1 : 0;
    line.push_back(&block);
    if (left_out == nullptr && !waits && line.size() > 2 && next_random(random) % 16 == 0)
      leave_out_last();
    call_next();
    wait(block, lock);
  }
  // Blocks that wait to begin do so: some have no OS thread.
  void give_up() {
    const std::lock_guard<std::mutex> lock(mutex);
    has_given_up = true;
    line.clear();
    changed.notify_all();
  }
  void end() {
    const std::lock_guard<std::mutex> lock(mutex);
    running = nullptr;
    in_vain = 0;
    if (!line.empty() || left_out != nullptr) call_next();
  }

 private:
  void leave_out_last() {
    left_out = line.back();
    line.pop_back();
  }
  void call_next() {
    if (left_out != nullptr && (line.empty() || in_vain > 4 * line.size())) {
      line.insert(line.begin(), std::exchange(left_out, nullptr));
      in_vain = 0;
    }
    running = line.front();
    line.erase(line.begin());
    changed.notify_all();
  }
  void wait(Block& block, std::unique_lock<std::mutex>& lock) {
    const unsigned ticks = block.signals.ticks;  // without those of the others
    changed.wait(lock, [&] { return running == &block || has_given_up; });
    block.signals.ticks = ticks;
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Block*> line;
  Block *running = nullptr, *left_out = nullptr;
  size_t in_vain = 0;  // turns since a block has done more than wait
  bool has_given_up = false;
  uint64_t missing, random;
};

struct Outcome {
  cudaError_t error = cudaSuccess;
  std::string message;
};

// The blocks of a launch, run by any number of OS threads; with clusters, by one thread per block
// of a cluster, so that all unfinished blocks of the first unfinished cluster run at once; or by
// one thread per block of the grid, if all blocks must run at once. A block that has started runs
// to its end, so the first failing block in the order is always the same.
struct GridRun {
  Launch launch;
  const uint64_t blocks;
  const uint64_t cluster;
  const BlockOrder order, within;  // of clusters, and of blocks within one
  const uint64_t most_resident;    // blocks that the device runs at once
  std::vector<Cluster> clusters;
  std::atomic<uint64_t> next{0};
  std::mutex mutex;
  uint64_t failed;  // its place in the order
  Outcome outcome;
  std::deque<std::thread> others;  // OS threads
  std::optional<Turns> turns;

  // Of blocks that poll words in vain. A round ends when all that run have since the last event.
  std::mutex polling;  // of what follows
  std::atomic<uint64_t> events{0}, running{0};
  uint64_t last_events = 0, round = 1, rounds = 0, stuck = 0;

  explicit GridRun(const Launch& l)
      : launch(l),
        blocks(count_in(l.grid)),
        cluster(l.blocks_of_cluster()),
        order(l, blocks / cluster),
        within(l, cluster),
        most_resident(resident_blocks_of(l)),
        clusters(l.cluster > 0 ? blocks / cluster : 0),
        failed(blocks) {
    launch.clusters = clusters.data();
    launch.run = this;
    if (checks_races && l.is_at_once) turns.emplace(blocks, l.seed);
  }

  uint64_t block_at(uint64_t place) const {
    return order[place / cluster] * cluster + within[place % cluster];
  }

  void fail(uint64_t place, cudaError_t code, const std::string& what) {
    const std::lock_guard<std::mutex> lock(mutex);
    next = blocks;
    // Blocks of this cluster and of later ones may wait for a block that will never start.
    for (uint64_t i = place == blocks || launch.is_at_once ? 0 : place / cluster;
         i < clusters.size(); ++i)
      clusters[order[i]].failed = true;
    if (outcome.error != cudaSuccess && place >= failed) return;
    failed = place;
    outcome = {code, what};
  }

  void work() {
    Block* block = nullptr;
    try {
      block = Blocks::instance().acquire();
      block->prepare(launch);
      const Subnormals subnormals(launch.flushes);
      const SignalStack signal_stack(*block);
      std::optional<Ticker> ticker;
      if (launch.tick_limit != 0 || InterruptCounter::counts()) ticker.emplace();
      for (uint64_t place; (place = next++) < blocks;) {
        ++running, ++events;
        if (turns) {
          block->number = block_at(place);
          turns->begin(*block);
        }
        const bool is_right = block->run(block_at(place));
        if (turns) turns->end();
        --running, ++events;
        if (!is_right && block->error != emulatorErrorCluster)
          fail(place, block->error, block->message);
      }
      if (block->stacks_overflowed())
        fail(blocks, cudaErrorLaunchFailure, "a thread's stack overflowed");
    } catch (const std::exception& exception) {
      fail(blocks, cudaErrorMemoryAllocation, exception.what());
    }
    if (block != nullptr) Blocks::instance().release(block);
  }

  // Waits for the other OS threads. They may start more.
  void join_others() {
    for (size_t i = 0;; ++i) {
      std::thread* other;
      {
        const std::lock_guard<std::mutex> lock(polling);
        if (i == others.size()) return;
        other = &others[i];
      }
      other->join();
    }
  }

  // Starts OS threads until there are `count`, and the caller's. Returns false if it fails.
  // `polling` must be locked.
  bool start_others(uint64_t count) {
    try {
      while (others.size() < count)
        others.emplace_back(&GridRun::thread_main, static_cast<void*>(this));
    } catch (const std::system_error&) {
      return false;
    }
    return true;
  }

  // Called when a block's threads have all polled in vain, some times. Returns whether no running
  // block can end that. Others start if they are resident at the same time.
  bool is_hopeless(Block& block) {
    const std::lock_guard<std::mutex> lock(polling);
    block.in_flight.rotations = 0;
    if (std::exchange(last_events, events) != events) ++round, rounds = stuck = 0;
    if (std::exchange(block.stuck_round, round) == round || ++stuck < running) return false;
    ++round, stuck = 0;
    if (++rounds < 3) return false;  // a block may have changed a word after others had read it
    if (next >= blocks || running < cluster || running + cluster > most_resident ||
        outcome.error != cudaSuccess)
      return true;
    const uint64_t more = std::min<uint64_t>(running, most_resident - running) / cluster * cluster;
    return !start_others(others.size() + std::min(more, blocks - next));
  }

  // For std::thread. Its template instances are visible to other libraries, so their arguments must
  // not be our types.
  static void thread_main(void* run) { static_cast<GridRun*>(run)->work(); }
};

// Reads the settings and checks the launch before it runs.
inline Outcome check(Launch& launch, uint64_t& workers) {
  const dim3 grid = launch.grid, block = launch.block;
  if (const std::string wrong = read_settings(launch, workers); !wrong.empty())
    return {emulatorErrorSetting, wrong};
  const uint64_t threads = count_in(block);
  if (threads == 0 || threads > kMaxThreads || block.z > 64) {
    return {cudaErrorInvalidConfiguration,
            format("a block of {} threads: 1 to 1024 are possible", block)};
  }
  if (grid.x - 1 >= 0x7fffffff || grid.y - 1 >= 65535 ||
      grid.z - 1 >= 65535) {  // 0 - 1 wraps to the largest value
    return {cudaErrorInvalidConfiguration, format("a grid of {} blocks is not possible", grid)};
  }
  if (launch.cluster > 1 && launch.arch < 90)
    return {cudaErrorNotSupported, "clusters need compute capability 9.0"};
  if (launch.cluster > kMaxCluster || (launch.cluster > 0 && grid.x % launch.cluster != 0)) {
    return {cudaErrorInvalidConfiguration,
            format("clusters of {} blocks of a grid of {} are not possible", launch.cluster, grid)};
  }
  const uint64_t blocks = count_in(grid);
  if (launch.is_at_once && blocks > resident_blocks_of(launch)) {
    return {cudaErrorCooperativeLaunchTooLarge,
            format("{} blocks do not run at once on a device of {} multiprocessors "
                   "(ATTENTION_EMULATOR_MULTIPROCESSORS), which has room for {}",
                   blocks, Device::emulated().multiprocessors, resident_blocks_of(launch))};
  }
  if (launch.dynamic_shared > launch.shared_limit) {
    return {cudaErrorInvalidValue,
            format("{} bytes of dynamic shared memory are more than the {} of the emulated device",
                   launch.dynamic_shared, launch.shared_limit)};
  }
  return {};
}

inline Outcome run_grid(Launch launch) {
  uint64_t workers = 1;
  if (const Outcome wrong = check(launch, workers); wrong.error != cudaSuccess) return wrong;
  [[maybe_unused]] static const bool handling = [] {
    catch_faults();
    handle(tick_signal(), on_tick, SA_RESTART);
    return true;
  }();
  const InterruptCounter counter;
  launch.interrupts = interrupts.count;

  GridRun run(launch);
  if (launch.is_at_once)
    workers = run.blocks;
  else if (launch.cluster > 1)
    workers = launch.cluster;
  // Use the threads that could be started, except for blocks that must run at the same time.
  std::unique_lock<std::mutex> lock(run.polling);
  const bool are_enough = run.start_others(std::min(workers, run.blocks) - 1);
  lock.unlock();
  if (!are_enough && (launch.cluster > 1 || launch.is_at_once))
    run.fail(0, cudaErrorLaunchOutOfResources, "too few OS threads for blocks that run at once");
  if (!are_enough && run.turns) run.turns->give_up();
  run.work();
  run.join_others();
  return run.outcome;
}

// ---- Launches -----------------------------------------------------------------------------------

// A launch that later ones may overlap.
struct QueuedLaunch {
  Launch launch;
  void (*release)(const void* arguments);
  std::mutex mutex;
  bool has_run = false;
  Outcome outcome;
  LaunchOrder order;
  const QueuedLaunch* before = nullptr;  // of the same call, if there is one

  QueuedLaunch(const Launch& l, void (*r)(const void*)) : launch(l), release(r) {
    launch.in_stream = &order;
  }
  ~QueuedLaunch() { release(launch.arguments); }
  QueuedLaunch(const QueuedLaunch&) = delete;

  // What has ended when the launch begins, if that is known.
  uint32_t begins_after() const {
    if (!launch.is_early) return order.number - 1;
    if (before == nullptr) return order.before_call - 1;
    return before->has_run ? before->order.allows : 0;
  }

  // Runs the launch on the first call. It gets its own OS thread if the caller's holds the static
  // shared arrays of the next launch.
  const Outcome& run(bool on_own_thread) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (std::exchange(has_run, true)) return outcome;
    if (on_own_thread) {
      std::thread(&QueuedLaunch::thread_main, static_cast<void*>(this)).join();
    } else {
      thread_main(this);
    }
    return outcome;
  }

  static void thread_main(void* self) {
    auto& it = *static_cast<QueuedLaunch*>(self);
    LaunchOrder& order = it.order;
    order.begins_after = it.begins_after();
    it.outcome = run_grid(it.launch);
    order.begins_after = it.begins_after();
    // A block that does not know more lets the next launch start as early as it has started.
    if (order.allows < order.number - 1) order.allows = std::max(order.allows, order.begins_after);
    register_launch(order, false);
    if (it.outcome.error != cudaSuccess) return;
    if (order.begins_after != 0 && order.deferred > order.begins_after)
      it.outcome = {cudaErrorLaunchFailure, order.message};
    else if (it.launch.is_early && !order.waited)
      it.outcome = {cudaErrorLaunchFailure,
                    "a kernel that is launched early ended, and none of its threads called "
                    "wait_for_previous(): the next kernel may start before the previous one has "
                    "ended"};
  }
};

// A host thread's last error, and its launches between begin_launches() and finish_launches().
struct HostThread {
  std::string error;
  bool queues = false;
  std::vector<std::unique_ptr<QueuedLaunch>> launches;
  cudaError_t kept = cudaSuccess;  // of launches that returned none
  bool is_taken = false;

  // Returns the calling thread's. None is destroyed: threads may outlive statics.
  static HostThread& own() {
    static std::mutex mutex;
    static auto* const all = new std::map<std::thread::id, HostThread>;
    const std::lock_guard<std::mutex> lock(mutex);
    return (*all)[std::this_thread::get_id()];
  }
  cudaError_t report(const Outcome& outcome) {
    error = outcome.message;
    return outcome.error;
  }
};

std::string last_error() { return HostThread::own().error; }

void begin_launches() {
  HostThread& own = HostThread::own();
  own.queues = true;
  own.launches.clear();
  own.kept = cudaSuccess;
}

cudaError_t keep_error(cudaError_t error) {
  HostThread& own = HostThread::own();
  if (error != cudaSuccess) own.kept = error, own.is_taken = false;
  return error;
}

cudaError_t kept_error(Taking taking) {
  HostThread& own = HostThread::own();
  if (own.is_taken && taking != kEver) return cudaSuccess;
  // A fault of a kernel is the context's, and a refused launch is not.
  const bool is_fault =
      own.kept >= cudaErrorIllegalAddress && own.kept != cudaErrorLaunchOutOfResources &&
      own.kept != cudaErrorCooperativeLaunchTooLarge && own.kept != cudaErrorNotSupported;
  own.is_taken |= taking == kTake && !is_fault;
  return own.kept;
}

// Runs `count` launches, all early except the first, starting with the last.
inline const Outcome& run_overlapping(const std::unique_ptr<QueuedLaunch>* launches, size_t count) {
  for (size_t i = 1; i < count; ++i) launches[i]->order.previous = launches[i - 1].get();
  for (size_t i = count; i-- > 0;) {
    if (launches[i]->run(/*on_own_thread=*/i + 1 < count).error != cudaSuccess) break;
  }
  const auto failed = [](const auto& launch) { return launch->outcome.error != cudaSuccess; };
  return (*std::find_if(launches, launches + count - 1, failed))->outcome;
}

cudaError_t finish_launches(cudaError_t error) {
  HostThread& host = HostThread::own();
  host.queues = false;
  const auto launches = std::move(host.launches);
  if (error != cudaSuccess) return error;
  const Call call(launches.size());
  for (size_t i = 0; i < launches.size(); ++i) {
    LaunchOrder& order = launches[i]->order;
    order.number = call.before + 1 + static_cast<uint32_t>(i);
    order.before_call = call.before;
    if (i > 0) launches[i]->before = launches[i - 1].get();
    register_launch(order, true);
  }
  for (size_t first = 0, end; first < launches.size(); first = end) {
    end = first + 1;
    while (end < launches.size() && launches[end]->launch.is_early) ++end;
    for (size_t count; first < end; first += count) {
      count = (end - first - 1) % most_overlapping + 1;
      const Outcome& outcome = run_overlapping(&launches[first], count);
      if (outcome.error != cudaSuccess) return host.report(outcome);
    }
  }
  return cudaSuccess;
}

cudaError_t run_launch(const Launch& launch, void (*release)(const void* arguments)) {
  auto one = std::make_unique<QueuedLaunch>(launch, release);
  HostThread& host = HostThread::own();
  uint64_t workers;
  const cudaError_t error = host.report(check(one->launch, workers));
  if (error == cudaSuccess) host.launches.push_back(std::move(one));
  return host.queues ? error : finish_launches(error);
}

cudaError_t run_queued() {
  HostThread& host = HostThread::own();
  if (!host.queues || host.launches.empty()) return cudaSuccess;
  const cudaError_t error = finish_launches(cudaSuccess);
  host.queues = true;
  return error;
}

void wait_for_previous() {
  Block& block = *this_fiber().block;
  LaunchOrder& order = *block.launch->in_stream;
  __atomic_store_n(&order.waited, true, __ATOMIC_RELAXED);
  if (order.previous != nullptr) {
    const unsigned ticks = block.signals.ticks;  // without those of the other launch
    const Outcome& outcome = order.previous->run(/*on_own_thread=*/true);
    block.signals.ticks = ticks;
    if (outcome.error != cudaSuccess) fail(outcome.error, outcome.message);
  }
  if (block.races != nullptr) block.races->wait_for_previous();
}

void let_other_blocks_run(Block& block, bool waits) {
  if (block.launch->run->turns) block.launch->run->turns->pass(block, waits);
}

void note_event(const Launch& launch) {
  this_fiber().block->in_flight.progress();
  ++launch.run->events;
}

void end_if_hopeless(const Site& site, const void* code) {
  Block& block = *this_fiber().block;
  GridRun& run = *block.launch->run;
  if (__atomic_load_n(&run.outcome.error, __ATOMIC_RELAXED) != cudaSuccess)
    fail(emulatorErrorCluster, "another block of the grid has failed");
  if (block.in_flight.rotations < 8 || !run.is_hopeless(block)) return;
  const uint64_t left = run.blocks - std::min<uint64_t>(run.next, run.blocks);
  const std::string where =
      site.name != nullptr ? text(site) : "a load" + place(reinterpret_cast<uintptr_t>(code) - 1);
  const uint64_t running = run.running;
  const std::string why =
      left == 0 ? format(
                      "what it waits for is changed by none of the {} running blocks, all of "
                      "which wait",
                      running)
                : format(
                      "all {} running blocks wait, and the other {} of the grid cannot start: a "
                      "device of {} multiprocessors (ATTENTION_EMULATOR_MULTIPROCESSORS) has "
                      "room for {} of these blocks at once",
                      running, left, Device::emulated().multiprocessors, run.most_resident);
  fail(cudaErrorLaunchTimeout,
       format("{} is repeated for ever: {}{}", where, why, waiting_threads(block)));
}

}  // namespace attention::emulator
