// What a block has in flight: its barriers in shared memory, copies, products and named barriers,
// and what the hardware's asynchronous units see of shared memory.

#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <vector>

#include "shared_memory.h"
#include "types.h"

// A tensor map, with CUDA's name. Not hidden: see cuda_fp16.h.
struct alignas(64) CUtensorMap_st {
  const unsigned char* tensor;
  int64_t sizes[5];
  int64_t strides[5];  // in bytes
  int box[5];
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

// A part of a tensor, at these coordinates; also contiguous bytes, as a tensor of bytes.
struct Box {
  CUtensorMap_st map;
  std::array<int, 5> at;
};

// A copy to shared memory in flight.
struct BulkCopy {
  void* to;
  size_t bytes;
  const void* barrier;
  Site site;
  const void* code;  // the call's return address
  Box from{};
};

// A copy from shared memory that has not been read yet: `to` is the tile, `from` the box written.
struct TileStore : BulkCopy {
  unsigned thread;
  unsigned group;
  std::vector<unsigned char> content;  // of the tile when the copy began
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

// A copy of 4, 8 or 16 bytes in flight to shared memory, or with size 0 the end of a group of
// copies; see cuda_pipeline.h.
struct PendingCopy {
  void* to;
  size_t size;
  unsigned char data[16];
};

// Registers that a thread has passed to multiply_fence(), or sums of asm, and their content then, or
// when they were complete.
struct FencedRegisters {
  const void* registers;
  std::vector<unsigned char> content;
};

// A word that a thread has read or has failed to change.
struct Poll {
  const void* word;
  uint64_t value;
};
constexpr unsigned kPolls = 4;

// What a thread has begun.
struct OfThread {
  std::vector<PendingCopy> copies;  // to shared memory
  unsigned store_group = 0;         // of copies from there: the next one to be committed
  std::vector<FencedRegisters> fenced;
  bool lacks_fence = true;                           // of asm, since its last sums were complete
  unsigned cluster_arrivals = 0, cluster_waits = 0;  // at the cluster's barrier
  Poll polls[kPolls]{};                              // the last ones
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

// A lane's arguments of a product.
struct ProductCall {
  float* sums;
  int count;
  const unsigned* a_registers;  // or null
  uint64_t a, b;                // descriptors
  bool is_bfloat16, is_transposed, accumulates;
  const void* code;              // the call's return address
  float* const* each = nullptr;  // each of the sums, in asm, whose fence names no registers
};

// A warp's part of a product in flight, with lane 0's arguments.
struct Product : ProductCall {
  unsigned group;
  unsigned columns;
  std::vector<uint16_t> operands;  // A's rows and B's columns when the product began
  Site site;
};

struct ProductsOfWarp {
  std::vector<Product> products;
  std::vector<SumsInFlight> sums;
  unsigned group = 0;  // the next one to be committed
  size_t begun = 0;    // products
};

// Set by the recorder of accesses, which counts copies and products; else null. For a store, `to`
// is the tile that it reads.
inline void (*on_copy)(const BulkCopy& copy, bool is_store) = nullptr;
inline void (*on_product)(const Product& product, unsigned warp) = nullptr;

struct InFlight {
  std::vector<OfThread> threads;
  std::vector<KnownBarrier> barriers;
  std::vector<BulkCopy> copies;
  std::vector<TileStore> stores;
  NamedBarrier named[kNamedBarriers];
  // Dynamic shared memory as asynchronous copies and products see it, from the first of them on.
  // What threads write appears here at a proxy_fence(), what copies write at once.
  std::vector<unsigned char> seen;
  std::vector<ProductsOfWarp> products;  // by warp
  // By warpgroup, what its warps must agree on: of each product A, B and the line.
  std::vector<std::vector<std::tuple<uint64_t, uint64_t, int>>> issued;
  std::vector<unsigned> registers;  // by warp; empty before the first change
  unsigned free_registers = 0;
  unsigned idle = 0;               // failed waits since anything has happened
  unsigned rotations = 0;          // the same: how often all threads that can run have had a turn
  bool waits_for_barrier = false;  // whether one of them was for a barrier in shared memory
  uint64_t events = 0;             // of the cluster, at the last of them

  // Something has happened for which a thread may wait.
  void progress() { idle = rotations = 0; }
};

}  // namespace attention::emulator

#pragma GCC visibility pop
