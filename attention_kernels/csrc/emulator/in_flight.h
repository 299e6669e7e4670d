// What a block has in flight: its barriers in shared memory, copies, products and named barriers,
// and what the hardware's asynchronous units see of shared memory.

#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "shared_memory.h"
#include "types.h"

// A tensor map, with CUDA's name. Not hidden: see cuda_fp16.h.
struct alignas(64) CUtensorMap_st {
  const unsigned char* tensor;
  int64_t sizes[4];
  int64_t strides[4];  // in bytes
  int box[4];
  int element_bytes;
  int swizzle;  // permuted bits of the number of a 16-byte chunk
};

#pragma GCC visibility push(hidden)

namespace attention::emulator {

// A barrier in shared memory that the block has initialized.
struct KnownBarrier {
  const void* barrier;
  bool is_fenced = false;  // whether copies can see it
  int waiter = -1;         // the last thread that waited in vain
  unsigned thread = 0;     // that initialized it, and when, for Races
  uint32_t clock = 0;
};

// A copy to shared memory in flight: of `bytes` contiguous bytes, or of a tensor's box.
struct BulkCopy {
  void* to;
  const void* from;  // null for a box
  size_t bytes;
  const void* barrier;
  Site site;
  CUtensorMap_st map{};
  int at[4] = {};
};

// A copy of a box from shared memory, which has not been read yet.
struct TileStore {
  unsigned thread;
  unsigned group;
  const unsigned char* from;
  std::vector<unsigned char> bytes;  // of the tile when the copy began
  CUtensorMap_st map;
  int at[4];
  Site site;
  const void* code;
};

// One of the barriers with a number.
struct NamedBarrier {
  unsigned threads = 0;  // that it waits for; 0 before the first arrives
  unsigned arrived = 0;
  uint32_t lanes[32]{};    // that have arrived, by warp
  uint32_t waiting[32]{};  // those of them that wait
  unsigned thread = 0;     // the first to arrive
  Site site{};
};
constexpr unsigned kNamedBarriers = 16;

// Dynamic shared memory as asynchronous copies and products see it. What threads write appears here
// at a proxy_fence(), what copies write at once.
class AsyncView {
 public:
  // Call it when a block begins.
  void close() { is_open = false; }

  // Shows all that the threads have written.
  void update(const SharedMemory& shared, uint32_t poison) {
    open(shared, poison);
    std::memcpy(seen.data(), shared.dynamic, shared.dynamic_bytes);
  }

  // Shows some bytes.
  void update(const SharedMemory& shared, uint32_t poison, const void* from, size_t bytes) {
    open(shared, poison);
    const size_t offset = static_cast<const unsigned char*>(from) - shared.dynamic;
    if (offset < shared.dynamic_bytes) std::memcpy(&seen[offset], from, bytes);
  }

  bool has_seen(const SharedMemory& shared, uint32_t poison, const void* from, size_t bytes) {
    open(shared, poison);
    const size_t offset = static_cast<const unsigned char*>(from) - shared.dynamic;
    if (offset >= shared.dynamic_bytes) return true;  // not known of static arrays
    return std::memcmp(&seen[offset], from, bytes) == 0;
  }

 private:
  void open(const SharedMemory& shared, uint32_t poison) {
    if (is_open) return;
    is_open = true;
    seen.resize(shared.dynamic_bytes);
    SharedMemory::fill(seen.data(), seen.size(), poison);
  }

  bool is_open = false;
  std::vector<unsigned char> seen;
};

// Registers that a thread has passed to multiply_fence(), and their content then.
struct FencedRegisters {
  const void* registers;
  std::vector<unsigned char> content;
};

// The sums of products in flight of a warp. The threads' variables hold poison meanwhile.
struct SumsInFlight {
  float* variables[32];       // by lane, the first one
  unsigned count;             // of a lane
  std::vector<float> values;  // by lane
  unsigned products = 0;      // in flight
  Site site;                  // of the first
  std::vector<float*> each;   // by lane, unless they follow the first

  float& variable(unsigned lane, unsigned i) const {
    return each.empty() ? variables[lane][i] : *each[lane * count + i];
  }
};

// A warp's part of a product in flight.
struct Product {
  float* sums;  // the variable of lane 0
  unsigned group;
  unsigned columns;
  bool is_bfloat16, is_transposed, accumulates, has_a_in_registers;
  uint64_t a, b;                   // descriptors
  std::vector<uint16_t> operands;  // A's rows and B's columns when the product began
  Site site;
  const void* code;
};

// What the warps of a warpgroup must agree on.
struct IssuedProduct {
  uint64_t a, b;
  int line;
};

struct ProductsOfWarp {
  std::vector<Product> products;
  std::vector<SumsInFlight> sums, complete;  // complete: those of asm, which may have changed since
  unsigned group = 0;                        // the next one to be committed
  size_t begun = 0;                          // products
};

// Set by the recorder of accesses, which counts copies and products; else null. For a store, `to` is
// the tile that it reads. `code` is the call's return address.
inline void (*on_copy)(const BulkCopy& copy, bool is_store, const void* code) = nullptr;
inline void (*on_product)(const Product& product, unsigned warp) = nullptr;

struct InFlight {
  std::vector<KnownBarrier> barriers;
  std::vector<BulkCopy> copies;
  std::vector<TileStore> stores;
  std::vector<unsigned> store_groups;  // by thread: the next one to be committed
  NamedBarrier named[kNamedBarriers];
  AsyncView view;
  std::vector<ProductsOfWarp> products;            // by warp
  std::vector<std::vector<IssuedProduct>> issued;  // by warpgroup
  unsigned products_left = 0;
  std::vector<std::vector<FencedRegisters>> fenced;  // by thread
  std::vector<bool> lacks_fence;    // by thread: of asm, since its last sums were complete
  std::vector<unsigned> registers;  // by warp; empty before the first change
  unsigned free_registers = 0;
  unsigned idle = 0;               // failed waits since anything has happened
  unsigned rotations = 0;          // the same: how often all threads that can run have had a turn
  bool waits_for_barrier = false;  // whether one of them was for a barrier in shared memory
  uint64_t events = 0;             // of the cluster, at the last of them

  void clear() {
    barriers.clear();
    copies.clear();
    stores.clear();
    store_groups.clear();
    for (NamedBarrier& barrier : named) barrier = {};
    view.close();
    products.clear();
    issued.clear();
    products_left = 0;
    fenced.clear();
    lacks_fence.clear();
    registers.clear();
    idle = rotations = 0;
    events = 0;
  }

  // Something has happened for which a thread may wait.
  void progress() { idle = rotations = 0; }
};

}  // namespace attention::emulator

#pragma GCC visibility pop
