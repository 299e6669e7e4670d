// The emulator's versions of tma.cuh.
//
// A tile arrives when a thread waits for its barrier, and is stored when its thread waits for the
// store; neither happens earlier. Errors, reported with the caller's line: misaligned addresses, a
// destination that something in flight still reads or writes, a tile that is stored before threads'
// writes to it are visible, that changes before it is read, or that is never waited for.

#pragma once

#include "cluster.h"

using CUtensorMap = CUtensorMap_st;

#pragma GCC visibility push(hidden)

namespace attention {
using TensorMap = CUtensorMap;
}

namespace attention::ptx {

inline void prefetch(const TensorMap&) {}

// Defined in tma.cpp.
bool is_valid(const TensorMap& map);
using Coordinates = std::array<int, 5>;
void load_tile(void* to, const TensorMap& map, const Coordinates& at, Barrier* barrier,
               ATTENTION_EMULATOR_SITE);
void load_tile_to_blocks(unsigned blocks, void* to, const TensorMap& map, const Coordinates& at,
                         Barrier* barrier, ATTENTION_EMULATOR_SITE);
void store_tile(const TensorMap& map, const Coordinates& at, const void* from,
                ATTENTION_EMULATOR_SITE);
void store_bulk(void* to, const void* from, unsigned bytes, ATTENTION_EMULATOR_SITE);
void store_tiles_commit();
void finish_stores(unsigned groups);
template <int kGroups>
void store_tiles_wait() {
  finish_stores(kGroups);
}

// As in tma.cuh, whose tensors have four dimensions.
ATTENTION_EMULATOR_INLINE void load_tile(void* to, const TensorMap& map, int c0, int c1, int c2,
                                         int c3, Barrier* barrier, ATTENTION_EMULATOR_SITE) {
  load_tile(to, map, {c0, c1, c2, c3}, barrier, file, line);
}
ATTENTION_EMULATOR_INLINE void load_tile_to_blocks(unsigned blocks, void* to, const TensorMap& map,
                                                   int c0, int c1, int c2, int c3, Barrier* barrier,
                                                   ATTENTION_EMULATOR_SITE) {
  load_tile_to_blocks(blocks, to, map, {c0, c1, c2, c3}, barrier, file, line);
}
ATTENTION_EMULATOR_INLINE void store_tile(const TensorMap& map, int c0, int c1, int c2, int c3,
                                          const void* from, ATTENTION_EMULATOR_SITE) {
  store_tile(map, {c0, c1, c2, c3}, from, file, line);
}

}  // namespace attention::ptx

#pragma GCC visibility pop
