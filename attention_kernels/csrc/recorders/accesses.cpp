// Counts a launch()'s accesses to shared and global memory: requests, bank conflicts, sectors. It
// runs in the emulator, so it needs no GPU.
//
// The version file is compiled with -fsanitize=thread and -fsanitize-coverage=trace-pc, which put a
// call before every load and store and into every basic block; this file defines the functions
// called, in place of the sanitizers' own, and is itself compiled without them. The threads of a
// warp run one after the other; their steps between two barriers are then replayed in parallel. The
// lanes at the lowest address proceed first, so that those that leave a loop wait behind it for the
// others, as in hardware. Accesses of several lanes at once at one place are one request. The
// emulator itself reports copies by TMA, each a request of global and one of shared memory, and
// products of a warpgroup (wgmma), each a request for its operands in shared memory.
//
// Arguments: batch, seqlen, num_heads, head_dim, bytes of an element, 1 for a causal mask, and the
// layout, "contiguous" or another. Prints a line for each place, separated by tabs: "shared" or
// "global", "load", "store", "atomic", "TMA load", "TMA store" or "wgmma", bytes per lane, of a copy
// or a product all of its bytes, requests, wavefronts, bank conflicts, the
// most words that a wavefront wants from one bank, sectors, the fewest sectors that hold the same
// bytes; the costliest request's block, warp, wavefronts or sectors, array, and each lane's offset
// in it in bytes, "-" for an inactive lane; and the return addresses that lead to the place,
// outermost first. The program ends with the process that started it, or if a block takes longer
// than ATTENTION_EMULATOR_TIMEOUT seconds.

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <unordered_map>
#include <utility>
#include <vector>

#include "attention.h"
#include "emulator/cuda_emulator.h"
#include "emulator/runtime.h"
#include "recorders/channel.h"

namespace attention {

namespace {

using namespace emulator;

constexpr unsigned kBanks = 32;  // of 4 bytes
constexpr uintptr_t kSectorBytes = 32;
constexpr unsigned kWavefrontBytes = 128;      // bytes that shared memory delivers at once
constexpr size_t kMaxSteps = size_t{1} << 26;  // between two barriers: 1 GB

struct Range {
  uintptr_t begin;
  size_t size;
  const char* name = "";
  bool has(uintptr_t address) const { return address - begin < size; }
};

// The addresses that the lanes of a warp access at once.
struct Request {
  uint64_t block = 0;
  unsigned warp = 0;
  uint64_t cost = 0;
  uint32_t lanes = 0;
  uintptr_t address[kWarpSize] = {};
};

enum class Kind { kLoad, kStore, kAtomic, kTmaLoad, kTmaStore, kProduct };

// A place in the code, reached by one chain of calls: an access, or with size 0 a basic block.
struct Place {
  std::vector<uintptr_t> chain;
  unsigned size = 0;
  bool is_shared = false;
  Kind kind = Kind::kLoad;
  Range array{};  // the array accessed first
  uint64_t requests = 0, wavefronts = 0, conflicts = 0, ways = 0, sectors = 0, fewest_sectors = 0;
  Request costliest;

  // Counts a request, whose cost is what count_it() adds to wavefronts and sectors.
  template <typename Count>
  void count(Request request, Count count_it) {
    const uint64_t before = wavefronts + sectors;
    count_it();
    request.cost = wavefronts + sectors - before;
    if (++requests == 1 || request.cost > costliest.cost) costliest = request;
  }

  // Counts the accesses of some lanes at once. In one wavefront, shared memory delivers 4 bytes per
  // lane to a warp, 8 bytes to half a warp or 16 to a quarter. Two such groups share their
  // wavefronts if lanes i and i ^ 1 of both, or i and i ^ 2, want the same address. Lanes of a
  // group that want different words of one bank conflict: each such word takes another wavefront.
  void count_lanes(const uintptr_t (&address)[kWarpSize], uint32_t lanes) {
    if (!is_shared) return count_sectors(ranges(address, lanes));
    const unsigned group = size <= 4 ? kWarpSize : std::max(1u, kWavefrontBytes / size);
    unsigned together = group;
    for (unsigned first = 0; first < kWarpSize; first += together) {
      const uint32_t both = lanes & lanes_from(first, 2 * group);
      const bool merges = 2 * group <= kWarpSize && first % (2 * group) == 0 &&
                          (pairs_agree(address, both, 1) || pairs_agree(address, both, 2));
      together = merges ? 2 * group : group;
      const uint32_t delivered = lanes & lanes_from(first, together);
      if (delivered == 0) continue;
      unsigned in_bank[kBanks] = {};
      for (const uintptr_t word : units(ranges(address, delivered), 4)) ++in_bank[word % kBanks];
      const uint64_t most = *std::max_element(std::begin(in_bank), std::end(in_bank));
      wavefronts += most;
      conflicts += most - 1;
      ways = std::max(ways, most);
    }
  }

  // Counts the ranges of global memory that a request reads or writes.
  void count_sectors(const std::vector<Range>& ranges) {
    sectors += units(ranges, kSectorBytes).size();
    fewest_sectors += (units(ranges, 1).size() + kSectorBytes - 1) / kSectorBytes;
  }

  static uint32_t lanes_from(unsigned first, unsigned count) {
    return count >= kWarpSize ? ~0u : ((1u << count) - 1) << first;
  }

  // Returns whether lanes i and i ^ distance, if both are active, want the same address.
  static bool pairs_agree(const uintptr_t (&address)[kWarpSize], uint32_t lanes,
                          unsigned distance) {
    for (unsigned lane = 0; lane < kWarpSize; ++lane) {
      const unsigned other = lane ^ distance;
      if ((lanes >> lane & lanes >> other & 1) != 0 && address[lane] != address[other])
        return false;
    }
    return true;
  }

  // Returns what the lanes access.
  std::vector<Range> ranges(const uintptr_t (&address)[kWarpSize], uint32_t lanes) const {
    std::vector<Range> found;
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1)
      found.push_back({address[__builtin_ctz(rest)], size});
    return found;
  }

  // Returns the distinct units of `bytes` bytes in these ranges.
  std::vector<uintptr_t> units(const std::vector<Range>& ranges, uintptr_t bytes) const {
    std::vector<uintptr_t> found;
    for (const Range& range : ranges)
      for (uintptr_t unit = range.begin / bytes; unit <= (range.begin + range.size - 1) / bytes;
           ++unit)
        found.push_back(unit);
    std::sort(found.begin(), found.end());
    // Atomics of several lanes on one word of shared memory are serialized.
    if (!is_shared || kind != Kind::kAtomic)
      found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
  }
};

struct Step {
  unsigned place;
  uintptr_t address;
};

// A function that a thread is in: its frame on the stack, and the return address of its call. Some
// functions do not report their end, which a visit from an outer frame reveals; and a last basic
// block may follow the report.
struct Call {
  const void* frame;
  uintptr_t from;
  bool ended = false;
};

struct Recorder {
  std::vector<Range> tensors;
  Range static_shared{};
  std::vector<Place> places;
  std::unordered_map<uint64_t, unsigned> index;  // by a hash of chain, size and kind
  std::vector<unsigned> order, rank;             // of the places, by address
  std::vector<Call> calls[kMaxThreads];          // the functions that each thread is in
  std::vector<Step> steps[kMaxThreads];          // since the last barrier
  bool is_idle = true;                           // whether there are no steps
  uint64_t block = ~uint64_t{0};
  unsigned interval = 0;
  double timeout = 0;                           // seconds that a block may take; 0: no limit
  std::chrono::steady_clock::time_point began;  // when the block began
  uint64_t visits = 0;
  size_t pending = 0;  // steps since the last barrier

  // Returns the calling CUDA thread, or null outside of kernels, between two launches.
  Fiber* thread() {
    const auto stack_pointer = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
    if (Blocks::instance().of(stack_pointer) == nullptr) {
      end_block();
      return nullptr;
    }
    Fiber& fiber = this_fiber();
    if (fiber.block->number != block) {
      end_block();
      began = std::chrono::steady_clock::now();
    } else if (fiber.block->interval != interval) {
      replay();
    }
    block = fiber.block->number;
    interval = fiber.block->interval;
    return &fiber;
  }

  void end_block() {
    replay();
    block = ~uint64_t{0};
  }

  void enter(const void* frame, uintptr_t from) {
    const Fiber* const fiber = thread();
    if (fiber == nullptr) return;
    auto& chain = calls[fiber->thread];
    while (!chain.empty() && (chain.back().ended || chain.back().frame <= frame)) chain.pop_back();
    chain.push_back({frame, from});
  }

  void leave(const void* frame) {
    const Fiber* const fiber = thread();
    if (fiber == nullptr) return;
    auto& chain = calls[fiber->thread];
    while (!chain.empty() && chain.back().frame < frame) chain.pop_back();
    if (!chain.empty() && chain.back().frame == frame) chain.back().ended = true;
  }

  void visit(const void* frame, uintptr_t at, const void* pointer = nullptr, size_t size = 0,
             AccessKind kind = AccessKind::kRead) {
    const Fiber* const fiber = thread();
    if (fiber == nullptr) return;
    auto& chain = calls[fiber->thread];
    while (!chain.empty() && chain.back().frame < frame) chain.pop_back();
    // A function that accesses no memory does not report its start, so its basic blocks cannot be
    // placed.
    if (size == 0 && (chain.empty() || chain.back().frame != frame)) return;
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    const SharedMemory& shared = fiber->block->shared;
    const Range dynamic_shared{reinterpret_cast<uintptr_t>(shared.dynamic), shared.dynamic_bytes,
                               "dynamic"};
    Range array = tensor_of(address);
    const bool is_shared = array.size == 0;
    for (const Range& one : {dynamic_shared, static_shared})
      if (one.has(address)) array = one;
    if (size != 0 && array.size == 0) return;  // a thread's own variables: registers, on a GPU
    const unsigned place =
        place_at(chain, chain.size(), at, size, is_shared, static_cast<Kind>(kind), array);
    steps[fiber->thread].push_back({place, address});
    ++pending;
    is_idle = false;
    if (++visits % (1 << 16) == 0) check_limits(*fiber->block, at);
  }

  Range tensor_of(uintptr_t address) const {
    for (const Range& tensor : tensors)
      if (tensor.has(address)) return tensor;
    return {};
  }

  // Returns the number of the place at an address of the code, within the first calls of a thread.
  unsigned place_at(const std::vector<Call>& chain, size_t calls, uintptr_t at, size_t size,
                    bool is_shared, Kind kind, const Range& array) {
    uint64_t key = (size << 4) + 2 * static_cast<uint64_t>(kind) + is_shared;
    for (size_t i = 0; i < calls; ++i) key = (key ^ chain[i].from) * 0x9e3779b97f4a7c15u;
    key = (key ^ at) * 0x9e3779b97f4a7c15u;
    const auto [found, is_new] = index.try_emplace(key, places.size());
    if (is_new) {
      places.push_back({{}, static_cast<unsigned>(size), is_shared, kind, array});
      for (size_t i = 0; i < calls; ++i) places.back().chain.push_back(chain[i].from);
      places.back().chain.push_back(at);
    }
    return found->second;
  }

  // Returns the place of a copy or a product, from its return address: the calling thread's last
  // call is that of the emulator's function.
  Place& place_of(const void* code, size_t size, bool is_shared, Kind kind, const Range& array) {
    const auto& chain = calls[this_fiber().thread];
    const auto at = reinterpret_cast<uintptr_t>(code);
    size_t before = chain.size();
    while (before > 0 && chain[before - 1].from != at) --before;
    return places[place_at(chain, before > 0 ? before - 1 : chain.size(), at, size, is_shared, kind,
                           array)];
  }

  // Counts what a copy or a product accesses in shared memory. There are no bank conflicts: a copy
  // accesses rows of 128 bytes, in which a swizzle only permutes chunks, and a product, whose tiles
  // have the 128-byte swizzle, 8 chunks of as many rows.
  void count_tile(const void* code, size_t bytes, Kind kind, unsigned warp, uintptr_t begin) {
    Place& place = place_of(code, bytes, true, kind, {0, 0, "dynamic"});
    place.ways = 1;
    place.count({block, warp}, [&] {
      place.wavefronts += (begin + bytes - 1) / kWavefrontBytes - begin / kWavefrontBytes + 1;
    });
  }

  void copy(const BulkCopy& copy, bool is_store) {
    const unsigned warp = thread()->thread / kWarpSize;
    const Kind kind = is_store ? Kind::kTmaStore : Kind::kTmaLoad;
    std::vector<Range> rows;
    ptx::for_each_row(copy.from, [&](size_t, const unsigned char* row, size_t, size_t bytes) {
      if (bytes > 0) rows.push_back({reinterpret_cast<uintptr_t>(row), bytes});
    });
    const Range tensor = tensor_of(reinterpret_cast<uintptr_t>(copy.from.map.tensor));
    Place& global = place_of(copy.code, copy.bytes, false, kind, tensor);
    global.count({block, warp}, [&] { global.count_sectors(rows); });
    count_tile(copy.code, copy.bytes, kind, warp, reinterpret_cast<uintptr_t>(copy.to));
  }

  void product(const Product& product, unsigned warp) {
    thread();
    if (warp % 4 != 0) return;  // counted for the warpgroup
    const unsigned rows = product.columns + (product.a_registers != nullptr ? 0 : 4 * ptx::kRows);
    count_tile(product.code, rows * ptx::kDepth * sizeof(uint16_t), Kind::kProduct, warp, 0);
  }

  // Called every 65,536 visits, even by a thread in an endless loop, so no signal is needed.
  void check_limits(Block& running, uintptr_t at) const {
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - began;
    char what[128] = "";
    if (timeout > 0 && taken.count() > timeout) {
      std::snprintf(what, sizeof what, "the block did not end in %g s, at 0x%lx", timeout, at);
    } else if (pending > kMaxSteps) {
      std::snprintf(what, sizeof what, "no barrier and no end after %zu steps, at 0x%lx", kMaxSteps,
                    at);
    }
    if (*what == '\0') return;
    running.record(cudaErrorLaunchTimeout, what);
    running.abandon();
  }

  void replay() {
    if (std::exchange(is_idle, true)) return;
    if (order.size() < places.size()) {
      order.resize(places.size());
      rank.resize(places.size());
      std::iota(order.begin(), order.end(), 0);
      std::sort(order.begin(), order.end(),
                [&](unsigned a, unsigned b) { return places[a].chain < places[b].chain; });
      for (unsigned i = 0; i < order.size(); ++i) rank[order[i]] = i;
    }
    for (unsigned warp = 0; warp < kMaxThreads; warp += kWarpSize) replay_warp(warp);
    for (auto& of_thread : steps) of_thread.clear();
    pending = 0;
  }

  void replay_warp(unsigned first_thread) {
    const std::vector<Step>* const lanes = steps + first_thread;
    size_t done[kWarpSize] = {};
    for (;;) {
      unsigned lowest = ~0u;
      for (unsigned lane = 0; lane < kWarpSize; ++lane) {
        if (done[lane] < lanes[lane].size())
          lowest = std::min(lowest, rank[lanes[lane][done[lane]].place]);
      }
      if (lowest == ~0u) return;
      Place& place = places[order[lowest]];
      Request request{block, first_thread / kWarpSize};
      for (unsigned lane = 0; lane < kWarpSize; ++lane) {
        if (done[lane] == lanes[lane].size()) continue;
        const Step& step = lanes[lane][done[lane]];
        if (step.place != order[lowest]) continue;
        request.address[lane] = step.address;
        request.lanes |= 1u << lane;
        ++done[lane];
      }
      if (place.size != 0)
        place.count(request, [&] { place.count_lanes(request.address, request.lanes); });
    }
  }

  void print() const {
    constexpr const char* kinds[] = {"load", "store", "atomic", "TMA load", "TMA store", "wgmma"};
    for (const Place& place : places) {
      if (place.size == 0) continue;
      std::fprintf(channel, "%s\t%s\t%u\t%lu\t%lu\t%lu\t%lu\t%lu\t%lu\t",
                   place.is_shared ? "shared" : "global", kinds[static_cast<int>(place.kind)],
                   place.size, place.requests, place.wavefronts, place.conflicts, place.ways,
                   place.sectors, place.fewest_sectors);
      const Request& request = place.costliest;
      std::fprintf(channel, "%lu\t%u\t%lu\t%s\t", request.block, request.warp, request.cost,
                   place.array.name);
      // Offsets count from an address that is in bank 0 and begins a sector.
      const uintptr_t begin = place.array.begin / kWavefrontBytes * kWavefrontBytes;
      for (unsigned lane = 0; lane < kWarpSize; ++lane) {
        if ((request.lanes >> lane & 1) == 0) {
          std::fprintf(channel, "- ");
        } else {
          std::fprintf(channel, "%ld ", static_cast<long>(request.address[lane] - begin));
        }
      }
      std::fprintf(channel, "\t");
      for (const uintptr_t address : place.chain) std::fprintf(channel, "%lx ", address);
      std::fprintf(channel, "\n");
    }
  }
};

Recorder recorder;

void* tensor(const char* name, size_t bytes) {
  void* const memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (memory == nullptr) {
    std::fprintf(channel, "error: no memory for the %zu bytes of %s\n", bytes, name);
    std::exit(1);
  }
  std::memset(memory, 0, bytes);
  recorder.tensors.push_back({reinterpret_cast<uintptr_t>(memory), bytes, name});
  return memory;
}

}  // namespace
}  // namespace attention

// The caller's frame, and the address of the call.
#define HERE __builtin_frame_address(1), reinterpret_cast<uintptr_t>(__builtin_return_address(0))
#define ON_ACCESS(address, bytes, kind) recorder.visit(HERE, address, bytes, AccessKind::kind)
#define ON_VOLATILE(address, bytes, kind)  // only with --param=tsan-distinguish-volatile
// Atomic loads and stores are the emulator's own.
#define ON_ATOMIC(address, bytes, kind, order) \
  if (AccessKind::kind == AccessKind::kAtomic) ON_ACCESS(address, bytes, kind)
#define END_ATOMIC(changed) (void)(changed)

extern "C" {
void __sanitizer_cov_trace_pc() { attention::recorder.visit(HERE); }
void __tsan_func_entry(void* from) {
  attention::recorder.enter(__builtin_frame_address(1), reinterpret_cast<uintptr_t>(from));
}
void __tsan_init() {}
void __tsan_func_exit() { attention::recorder.leave(__builtin_frame_address(1)); }
}

#include "emulator/thread_sanitizer.h"

int main(int, char** arguments) {
  using namespace attention;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (const char* const limit = setting("ATTENTION_EMULATOR_TIMEOUT"))
    recorder.timeout = std::strtod(limit, nullptr);
  setenv("ATTENTION_EMULATOR_THREADS", "1", 1);
  most_overlapping = 1;  // or a launch may get its own OS thread and static arrays
  setenv("ATTENTION_EMULATOR_TIMEOUT", "0", 1);  // no signals: their handlers would be counted
  Params params{};
  params.batch = std::atoi(arguments[1]);
  params.seqlen = std::atoi(arguments[2]);
  params.num_heads = std::atoi(arguments[3]);
  params.head_dim = std::atoi(arguments[4]);
  const size_t element = std::strtoul(arguments[5], nullptr, 10);
  params.is_causal = std::atoi(arguments[6]) != 0;
  params.softmax_scale = 1 / std::sqrt(double(params.head_dim));
  // `__shared__` arrays are this program's thread-local storage; it has one OS thread.
  const Library& program = Library::instance();
  recorder.static_shared = {reinterpret_cast<uintptr_t>(program.storage()), program.storage_bytes,
                            "static"};
  on_copy = [](const BulkCopy& copy, bool is_store) { recorder.copy(copy, is_store); };
  on_product = [](const Product& product, unsigned warp) { recorder.product(product, warp); };

  // Zeros; views of one fused qkv if the version reads strided inputs.
  const int64_t row = int64_t{params.num_heads} * params.head_dim;
  const auto strides = [&](int64_t to_next) {
    return Strides{params.seqlen * to_next, to_next, params.head_dim};
  };
  const size_t bytes = row * params.batch * params.seqlen * element;
  if (std::strcmp(arguments[7], "contiguous") == 0) {
    params.q = tensor("q", bytes);
    params.k = tensor("k", bytes);
    params.v = tensor("v", bytes);
    params.q_strides = params.k_strides = params.v_strides = strides(row);
  } else {
    const auto* const qkv = static_cast<const unsigned char*>(tensor("qkv", 3 * bytes));
    params.q = qkv;
    params.k = qkv + row * element;
    params.v = qkv + 2 * row * element;
    params.q_strides = params.k_strides = params.v_strides = strides(3 * row);
  }
  params.o = tensor("o", bytes);
  params.o_strides = strides(row);
  params.scratch = static_cast<float*>(
      tensor("scratch", sizeof(float) * std::max<int64_t>(1, version.scratch_floats(&params))));

  auto error = cudaSuccess;
  try {
    error = static_cast<cudaError_t>(version.launch(&params, nullptr));
  } catch (const std::exception& refusal) {
    std::fprintf(channel, "%s\n", refusal.what());
    return 1;
  }
  if (error != cudaSuccess) {
    std::fprintf(channel, "error: %s: %s\n", cudaGetErrorName(error), last_error().c_str());
    return 1;
  }
  recorder.end_block();
  recorder.print();
}
