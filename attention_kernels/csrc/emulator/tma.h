// The emulator's versions of tma.cuh.
//
// A tile arrives when a thread waits for its barrier, and is stored when its thread waits for the
// store; neither happens earlier. Errors, reported with the caller's line: misaligned addresses, a
// destination that something in flight still reads or writes, a tile that is stored before threads'
// writes to it are visible, that changes before it is read, or that is never waited for.

#pragma once

#include "barrier.h"

using CUtensorMap = CUtensorMap_st;

#pragma GCC visibility push(hidden)

namespace attention {

using TensorMap = CUtensorMap;

enum class Swizzle { kNone, k32, k64, k128 };

namespace ptx {
// Defined in tma.cpp.
bool is_valid(const TensorMap& map);
void load_box(void* to, const TensorMap& map, const int (&at)[4], Barrier* barrier,
              const void* code, const Site& site);
void load_box_to_blocks(unsigned blocks, void* to, const TensorMap& map, const int (&at)[4],
                        Barrier* barrier, const void* code, const Site& site);
void store_box(const TensorMap& map, const int (&at)[4], const void* from, const void* code,
               const Site& site);
void store_bytes(void* to, const void* from, unsigned bytes, const void* code, const Site& site);
void end_store_group();
void finish_stores(unsigned groups);
}  // namespace ptx

template <typename T>
cudaError_t make_tensor_map(TensorMap* map, const T* tensor, const int64_t (&sizes)[4],
                            const int64_t (&strides)[3], const int (&box)[4],
                            Swizzle swizzle = Swizzle::k128) {
  *map = {reinterpret_cast<const unsigned char*>(tensor),
          {},
          {sizeof(T)},
          {},
          sizeof(T),
          static_cast<int>(swizzle)};
  for (int i = 0; i < 4; ++i) map->sizes[i] = sizes[i], map->box[i] = box[i];
  for (int i = 0; i < 3; ++i) map->strides[i + 1] = strides[i] * int64_t{sizeof(T)};
  return ptx::is_valid(*map) ? cudaSuccess : cudaErrorInvalidValue;
}

namespace ptx {

inline void prefetch(const TensorMap&) {}

__attribute__((noinline)) inline void load_tile(void* to, const TensorMap& map, int c0, int c1,
                                                int c2, int c3, Barrier* barrier,
                                                ATTENTION_EMULATOR_SITE) {
  load_box(to, map, {c0, c1, c2, c3}, barrier, __builtin_return_address(0),
           {"load_tile", file, line});
}
__attribute__((noinline)) inline void load_tile_to_blocks(unsigned blocks, void* to,
                                                          const TensorMap& map, int c0, int c1,
                                                          int c2, int c3, Barrier* barrier,
                                                          ATTENTION_EMULATOR_SITE) {
  load_box_to_blocks(blocks, to, map, {c0, c1, c2, c3}, barrier, __builtin_return_address(0),
                     {"load_tile_to_blocks", file, line});
}
__attribute__((noinline)) inline void store_tile(const TensorMap& map, int c0, int c1, int c2,
                                                 int c3, const void* from,
                                                 ATTENTION_EMULATOR_SITE) {
  store_box(map, {c0, c1, c2, c3}, from, __builtin_return_address(0), {"store_tile", file, line});
}
inline void store_tiles_commit() { end_store_group(); }
template <int kGroups>
void store_tiles_wait() {
  finish_stores(kGroups);
}

}  // namespace ptx
}  // namespace attention

#pragma GCC visibility pop
