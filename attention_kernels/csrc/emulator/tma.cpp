// Copies of tiles, and what copies must not meet in shared memory: see tma.h.

namespace attention::ptx {

inline void check_multiple_of_16(const void* to, const void* from, unsigned bytes,
                                 const Site& site) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16 != 0)
    fail(site, "addresses and size must be multiples of 16 bytes", cudaErrorMisalignedAddress);
}

inline bool overlap(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
  return offset(a, b) < b_bytes || offset(b, a) < a_bytes;
}

// Returns what is shown of a byte of dynamic shared memory, or null: of static arrays it is not
// known.
inline unsigned char* shown(const void* memory) {
  Block& block = *this_fiber().block;
  std::vector<unsigned char>& seen = block.in_flight.seen;
  const size_t offset = static_cast<const unsigned char*>(memory) - block.shared.dynamic;
  if (offset >= block.shared.dynamic_bytes) return nullptr;
  if (seen.empty()) {
    seen.resize(block.shared.dynamic_bytes);
    SharedMemory::fill(seen.data(), seen.size(), block.launch->poison);
  }
  return &seen[offset];
}
void show(const void* from, size_t bytes) {
  if (unsigned char* const to = shown(from)) std::memcpy(to, from, bytes);
}
// Whether they see it.
inline bool is_shown(const void* from, size_t bytes) {
  const unsigned char* const there = shown(from);
  return there == nullptr || std::memcmp(there, from, bytes) == 0;
}

void proxy_fence() {
  Block& block = *this_fiber().block;
  show(block.shared.dynamic, block.shared.dynamic_bytes);
  if (block.races != nullptr) block.races->proxy_fence();
  show_barriers();
}

void global_proxy_fence() {
  if (Races* const races = this_fiber().block->races) races->global_proxy_fence();
}

void add_copy(const BulkCopy& copy) {
  Block& block = *this_fiber().block;
  InFlight& in_flight = block.in_flight;
  for (const BulkCopy& other : in_flight.copies)
    if (overlap(copy.to, copy.bytes, other.to, other.bytes))
      fail(copy.site, format("the destination is still written by {}", other.site));
  for (const TileStore& store : in_flight.stores)
    if (overlap(copy.to, copy.bytes, store.to, store.bytes))
      fail(copy.site, format("the destination is still read by {}", store.site));
  if (const Site* const product = product_that_reads(copy.to, copy.bytes))
    fail(copy.site, format("the destination is still read by {}", *product));
  block.shared.fill(static_cast<unsigned char*>(copy.to), copy.bytes, block.launch->poison);
  show(copy.to, copy.bytes);
  in_flight.copies.push_back(copy);
  if (on_copy != nullptr) on_copy(copy, /*is_store=*/false);
}

// ---- Tensor maps --------------------------------------------------------------------------------

bool is_valid(const TensorMap& map) {
  bool valid = reinterpret_cast<uintptr_t>(map.tensor) % 16 == 0;
  for (int i = 0; i < 5; ++i) {
    valid &= map.sizes[i] >= 1 && map.sizes[i] <= int64_t{1} << 32;
    valid &= map.box[i] >= 1 && map.box[i] <= 256;
    if (i > 0) {
      const int64_t stride = map.strides[i];
      valid &= stride >= 0 && stride % 16 == 0 && stride < int64_t{1} << 40;
    }
  }
  const int width = map.box[0] * map.element_bytes;
  return valid && width % 16 == 0 && (map.swizzle == 0 || width == 16 << map.swizzle);
}

Box line_of(const void* memory, size_t bytes) {
  const auto size = static_cast<int>(bytes);
  return {{static_cast<const unsigned char*>(memory),
           {size, 1, 1, 1, 1},
           {1, size, size, size, size},
           {size, 1, 1, 1, 1},
           1,
           0},
          {}};
}

// Returns where a byte of a tile lies: the lowest bits of the chunk's number are combined with
// those of the number of its 128 bytes.
inline size_t swizzled(size_t offset, int swizzle) {
  return offset ^ ((offset >> 7 & ((1u << swizzle) - 1)) << 4);
}

inline void check_tile(const TensorMap& map, const void* tile, const Site& site) {
  const size_t alignment = map.swizzle == 0 ? 128 : 128u << map.swizzle;
  const auto* const first = static_cast<const unsigned char*>(tile);
  check_shared(first, "the tile", site);
  check_shared(first + box_bytes(map) - 1, "the tile", site);
  if (reinterpret_cast<uintptr_t>(tile) % alignment != 0)
    fail(site, format("the tile is not at a multiple of {} bytes", alignment),
         cudaErrorMisalignedAddress);
}

// ---- Loads --------------------------------------------------------------------------------------

void begin_copy(const BulkCopy& copy) {
  check_use(static_cast<const Barrier*>(copy.barrier), copy.site);
  receive_messages();
  if (Races* const races = this_fiber().block->races) {
    for_each_row(copy.from, [&](size_t, const unsigned char* row, size_t, size_t bytes) {
      if (bytes > 0) races->access(row, bytes, AccessKind::kFetch, copy.code);
    });
    races->access(copy.to, copy.bytes, AccessKind::kCopy, copy.code);
    races->release(copy.barrier);  // the copy's last action
  }
  add_copy(copy);
}

void copy_bulk(void* to, const void* from, unsigned bytes, Barrier* barrier, CachePolicy,
               const char* file, int line) {
  const Site site{"copy_bulk", file, line};
  check_multiple_of_16(to, from, bytes, site);
  begin_copy({to, bytes, barrier, site, __builtin_return_address(0), line_of(from, bytes)});
}

void load_tile(void* to, const TensorMap& map, const Coordinates& at, Barrier* barrier,
               const char* file, int line) {
  const Site site{"load_tile", file, line};
  check_tile(map, to, site);
  const void* const code = __builtin_return_address(0);
  begin_copy({to, box_bytes(map), barrier, site, code, {map, at}});
}

void load_tile_to_blocks(unsigned blocks, void* to, const TensorMap& map, const Coordinates& at,
                         Barrier* barrier, const char* file, int line) {
  const Site site{"load_tile_to_blocks", file, line};
  const void* const code = __builtin_return_address(0);
  const BulkCopy copy{to, box_bytes(map), barrier, site, code, {map, at}};
  const Block& self = *this_fiber().block;
  const unsigned count = self.launch->blocks_of_cluster();
  if (blocks == 0 || blocks >> count != 0)
    fail(site, format("the mask {} is not of blocks of a cluster of {}", blocks, count),
         cudaErrorIllegalInstruction);
  check_tile(map, to, site);
  check_shared(barrier, "the barrier", site);
  for (unsigned block = 0; block < count; ++block) {
    if ((blocks >> block & 1) == 0) continue;
    block == rank_of(self) ? begin_copy(copy) : send(block, copy);
  }
}

void fill_tile(const BulkCopy& copy) {
  const auto& map = copy.from.map;
  const size_t width = map.box[0] * map.element_bytes;
  auto* const tile = static_cast<unsigned char*>(copy.to);
  std::vector<unsigned char> row(width);
  for_each_row(copy.from,
               [&](size_t offset, const unsigned char* from, size_t skipped, size_t bytes) {
                 std::fill(row.begin(), row.end(), 0);
                 if (bytes > 0) std::memcpy(&row[skipped], from, bytes);
                 for (size_t i = 0; i < width; i += 16)
                   std::memcpy(tile + swizzled(offset + i, map.swizzle), &row[i],
                               std::min<size_t>(width - i, 16));
               });
}

// ---- Stores -------------------------------------------------------------------------------------

inline void begin_store(const BulkCopy& copy) {
  Block& block = *this_fiber().block;
  if (*std::min_element(copy.from.at.begin(), copy.from.at.end()) < 0)
    fail(copy.site, "a coordinate is negative", cudaErrorIllegalInstruction);
  const auto* const tile = static_cast<const unsigned char*>(copy.to);
  if (block.races != nullptr) block.races->access(tile, copy.bytes, AccessKind::kFetch, copy.code);
  check_visible(tile, copy.bytes, copy.site);
  if (on_copy != nullptr) on_copy(copy, /*is_store=*/true);
  block.in_flight.stores.push_back(
      {copy, this_fiber().thread, block.own().store_group, {tile, tile + copy.bytes}});
}

void store_tile(const TensorMap& map, const Coordinates& at, const void* from, const char* file,
                int line) {
  const Site site{"store_tile", file, line};
  check_tile(map, from, site);
  const void* const code = __builtin_return_address(0);
  begin_store({const_cast<void*>(from), box_bytes(map), nullptr, site, code, {map, at}});
}

void store_bulk(void* to, const void* from, unsigned bytes, const char* file, int line) {
  const Site site{"cp.async.bulk", file, line};
  check_multiple_of_16(to, from, bytes, site);
  check_shared(from, "the source", site);
  const void* const code = __builtin_return_address(0);
  begin_store({const_cast<void*>(from), bytes, nullptr, site, code, line_of(to, bytes)});
}

void store_tiles_commit() { ++this_fiber().block->own().store_group; }

inline void finish(const TileStore& store) {
  if (std::memcmp(store.content.data(), store.to, store.bytes) != 0)
    fail(store.site, "the tile was changed before it had been read");
  Races* const races = this_fiber().block->races;
  for_each_row(store.from,
               [&](size_t offset, const unsigned char* to, size_t skipped, size_t bytes) {
                 auto* const row = const_cast<unsigned char*>(to);
                 if (races != nullptr && bytes > 0)
                   races->access(row, bytes, AccessKind::kCopy, store.code);
                 for (size_t i = 0; i < bytes; ++i)
                   row[i] = store.content[swizzled(offset + skipped + i, store.from.map.swizzle)];
               });
}

void finish_stores(unsigned groups) {
  const Fiber& self = this_fiber();
  erase_if(self.block->in_flight.stores, [&](const TileStore& store) {
    if (store.thread != self.thread || store.group + groups >= self.block->own().store_group)
      return false;
    finish(store);
    return true;
  });
}

}  // namespace attention::ptx

namespace attention::emulator {

std::string left_by(const InFlight& in_flight, unsigned thread, bool is_last) {
  for (const TileStore& store : in_flight.stores) {
    if (store.thread == thread)
      return format("the thread ends while {} {}", store.site,
                    store.group < in_flight.threads[thread].store_group ? "reads its tile"
                                                                        : "is not in a group");
  }
  const ProductsOfWarp& mine = in_flight.products[thread / kWarpSize];
  if (!mine.products.empty())
    return format("the thread ends before {} is complete", mine.products[0].site);
  if (is_last && !in_flight.copies.empty())
    return format("the block ends before {} is complete", in_flight.copies[0].site);
  return "";
}

}  // namespace attention::emulator
