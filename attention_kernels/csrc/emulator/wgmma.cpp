// Products of a warpgroup: see wgmma.h. Each warp computes its 16 rows.

namespace attention::ptx {

constexpr uint32_t kPoisonSum = 0x7fa5e1f5;  // a signaling NaN: no computation leaves it as it is

inline ProductsOfWarp& products_of_warp() {
  const Fiber& self = this_fiber();
  return self.block->in_flight.products[self.thread / kWarpSize];
}

uint64_t matrix_descriptor(const void* tile, unsigned next_columns, const char* file, int line) {
  constexpr uint64_t kEightRows = 1024, kSwizzle128 = 1;
  check_shared(tile, "the tile", {"matrix_descriptor", file, line});
  return this_fiber().block->shared.address_of(tile) >> 4 | uint64_t{next_columns >> 4} << 16 |
         kEightRows >> 4 << 32 | kSwizzle128 << 62;
}

void check_visible(const unsigned char* bytes, size_t count, const Site& site) {
  const Block& block = *this_fiber().block;
  const int writer = block.races == nullptr ? -1 : block.races->unfenced_writer(bytes, count);
  if (writer >= 0 || !is_shown(bytes, count))
    fail(site, format("threads have written {} or near it, without a proxy_fence() after it",
                      describe(block.shared, bytes)));
}

// ---- Registers ----------------------------------------------------------------------------------

// They hold this content from now on.
inline void remember(OfThread& thread, const void* registers, const void* content, size_t bytes) {
  const auto is_it = [&](const FencedRegisters& fenced) { return fenced.registers == registers; };
  erase_if(thread.fenced, is_it);
  const auto* const first = static_cast<const unsigned char*>(content);
  thread.fenced.push_back({registers, {first, first + bytes}});
}

void multiply_fence(Registers a, Registers b, Registers c, Registers d, const char* file,
                    int line) {
  for (const Registers& one : {a, b, c, d})
    if (one.bytes != 0) remember(this_fiber().block->own(), one.first, one.first, one.bytes);
  meet({}, {"multiply_fence", file, line});
}

// The registers may be accessed from now on.
inline void forget_fence(OfThread& thread, const float* registers) {
  const auto has = [&](const FencedRegisters& fenced) {
    return offset(registers, fenced.registers) < fenced.content.size();
  };
  erase_if(thread.fenced, has);
}

inline bool is_fenced(const void* registers, const void* content, size_t bytes) {
  for (const FencedRegisters& fenced : this_fiber().block->own().fenced) {
    const size_t first = offset(registers, fenced.registers), count = fenced.content.size();
    if (first < count && bytes <= count - first &&
        std::memcmp(content, &fenced.content[first], bytes) == 0)
      return true;
  }
  return false;
}

inline SumsInFlight* sums_in_flight(const float* variable, unsigned lane) {
  for (SumsInFlight& sums : products_of_warp().sums)
    if (sums.variables[lane] == variable) return &sums;
  return nullptr;
}

void fence_all() { this_fiber().block->own().lacks_fence = false; }

inline void check_fenced(const ProductCall& call, const Site& site) {
  const bool is_asm = call.each != nullptr;
  std::vector<float> sums;
  for (int i = 0; i < call.count; ++i) sums.push_back(is_asm ? *call.each[i] : call.sums[i]);
  const char* const missing =
      is_asm ? " have been accessed, and no wgmma.fence was executed since"
             : " have been accessed, and no multiply_fence() that takes them was called since";
  if (sums_in_flight(call.sums, this_fiber().thread % kWarpSize) == nullptr &&
      !(is_asm && !this_fiber().block->own().lacks_fence) &&
      !is_fenced(call.sums, sums.data(), sums.size() * sizeof(float)))
    fail(site, std::string("the sums") + missing);
  if (!is_asm && call.a_registers != nullptr &&
      !is_fenced(call.a_registers, call.a_registers, 4 * sizeof(unsigned)))
    fail(site, std::string("the registers of A") + missing);
}

// ---- Operands -----------------------------------------------------------------------------------

// A descriptor's fields, in bytes.
struct Tile {
  unsigned start, next_columns, eight_rows;
  unsigned first;  // address of the memory
  const unsigned char* memory;
  size_t bytes;
};

inline Tile decode(uint64_t descriptor, bool is_transposed, unsigned rows, const Site& site) {
  const SharedMemory& shared = this_fiber().block->shared;
  const auto field = [&](int at) { return unsigned(descriptor >> at & 0x3fff) << 4; };
  const unsigned first_dynamic = shared.first_address(false);
  Tile tile{field(0), field(16), field(32), first_dynamic, shared.dynamic, shared.dynamic_bytes};
  if (tile.start < tile.first) {
    tile.first = shared.first_address(true);
    tile.memory = shared.statics;
    tile.bytes = Library::instance().storage_bytes;
  }
  if (descriptor >> 62 != 1)
    fail(site, "the descriptor does not say that the tile has the 128-byte swizzle");
  if ((descriptor >> 49 & 7) != 0 || tile.start / 128 % 8 != 0)
    fail(site, "the tile does not start at a multiple of 1024 bytes", cudaErrorMisalignedAddress);
  const unsigned chunks = is_transposed ? std::min(rows, 64u) / 8 : 2;
  if (tile.start / 16 % 8 + chunks > 8)
    fail(site, "the operand goes beyond the 128 bytes of a row");
  return tile;
}

// Returns the 16 bytes at an offset from a tile's start, as they are swizzled.
inline const unsigned char* chunk_at(const Tile& tile, unsigned offset, const Site& site) {
  const unsigned address = tile.start + offset;
  const size_t at = size_t{address ^ (address >> 7 & 7) << 4} - tile.first;
  if (at >= tile.bytes || at + 16 > tile.bytes)
    fail(site, "an operand is not in shared memory", cudaErrorIllegalAddress);
  return tile.memory + at;
}

// Calls chunk(address, row, k, is_transposed) for each 16 bytes of an operand of `rows` rows x 16,
// whose first row is number `to`: they are elements k to k + 7 of the row, or, transposed, element
// k of rows `row` to row + 7.
template <typename Chunk>
void for_each_chunk(uint64_t descriptor, bool is_transposed, unsigned first_row, unsigned rows,
                    unsigned to, const Site& site, Chunk chunk) {
  const Tile tile = decode(descriptor, is_transposed, first_row + rows, site);
  for (unsigned row = first_row; row < first_row + rows; row += is_transposed ? 8 : 1) {
    for (unsigned k = 0; k < kDepth; k += is_transposed ? 1 : 8) {
      const unsigned line = is_transposed ? k : row;
      const unsigned offset = line / 8 * tile.eight_rows + line % 8 * 128 +
                              (is_transposed ? row / 64 * tile.next_columns + row % 64 * 2 : k * 2);
      chunk(chunk_at(tile, offset, site), to + row - first_row, k, is_transposed);
    }
  }
}

// Calls chunk() for both operands of a warp's part of a product; the rows of B, its columns, follow
// those of A.
template <typename Chunk>
void for_each_chunk(const Product& product, unsigned warp, Chunk chunk) {
  if (product.a_registers == nullptr)
    for_each_chunk(product.a, false, warp % 4 * kRows, kRows, 0, product.site, chunk);
  for_each_chunk(product.b, product.is_transposed, 0, product.columns, kRows, product.site, chunk);
}

// Reads the operands in shared memory.
inline void gather(const Product& product, unsigned warp, std::vector<uint16_t>& operands) {
  for_each_chunk(
      product, warp, [&](const unsigned char* at, unsigned row, unsigned k, bool is_transposed) {
        uint16_t elements[8];
        std::memcpy(elements, at, 16);
        for (unsigned i = 0; i < 8; ++i)
          operands[is_transposed ? (row + i) * kDepth + k : row * kDepth + k + i] = elements[i];
      });
}

const Site* product_that_reads(const void* memory, size_t bytes) {
  const auto& all = this_fiber().block->in_flight.products;
  for (unsigned warp = 0; warp < all.size(); ++warp) {
    for (const Product& product : all[warp].products) {
      bool reads = false;
      for_each_chunk(product, warp, [&](const unsigned char* at, unsigned, unsigned, bool) {
        reads |= offset(at, memory) < bytes;
      });
      if (reads) return &product.site;
    }
  }
  return nullptr;
}

inline void check_operands(const Product& product, unsigned warp) {
  receive_messages();
  const auto& copies = this_fiber().block->in_flight.copies;
  for_each_chunk(product, warp, [&](const unsigned char* at, unsigned, unsigned, bool) {
    for (const BulkCopy& copy : copies) {
      if (offset(at, copy.to) < copy.bytes)
        fail(product.site,
             format("an operand is still written by {}: no thread has waited for its barrier",
                    copy.site));
    }
    check_visible(at, 16, product.site);
  });
}

// ---- Products -----------------------------------------------------------------------------------

inline bool is_poisoned(const SumsInFlight& sums) {
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    for (unsigned i = 0; i < sums.count; ++i)
      if (bit_cast<uint32_t>(sums.variable(lane, i)) != kPoisonSum) return false;
  }
  return true;
}

inline SumsInFlight take_sums(const MatrixCalls& calls, unsigned count, const Site& site) {
  SumsInFlight sums{};
  sums.count = count;
  sums.values.reserve(size_t{count} * kWarpSize);
  sums.site = site;
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    const auto& call = *static_cast<const ProductCall*>(calls[lane]->fragments[0]);
    sums.variables[lane] = call.sums;
    if (call.each != nullptr) sums.each.insert(sums.each.end(), call.each, call.each + count);
    for (unsigned i = 0; i < count; ++i) {
      sums.values.push_back(sums.variable(lane, i));
      sums.variable(lane, i) = bit_cast<float>(kPoisonSum);
    }
  }
  return sums;
}

// Compares a product with that of the other warps of the warpgroup.
inline void check_warpgroup(const Product& product, unsigned warp) {
  InFlight& in_flight = this_fiber().block->in_flight;
  auto& issued = in_flight.issued[warp / 4];
  const size_t mine = products_of_warp().begun++;
  const std::tuple operands(product.a, product.b, product.site.line);
  if (mine == issued.size()) issued.push_back(operands);
  if (issued[mine] != operands)
    fail(product.site, "the warps of the warpgroup multiply different operands");
}

inline void begin_product(const MatrixCalls& calls, const Site& site) {
  Block& block = *this_fiber().block;
  const unsigned warp = this_fiber().thread / kWarpSize;
  if (warp / 4 * 4 + 4 > block.warp_count) fail(site, "the warpgroup has fewer than 4 warps");
  const auto& call = *static_cast<const ProductCall*>(calls[0]->fragments[0]);
  ProductsOfWarp& mine = products_of_warp();
  const unsigned columns = 2 * call.count;
  Product product{call, mine.group, columns, std::vector<uint16_t>((kRows + columns) * kDepth),
                  site};
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    const auto& other = *static_cast<const ProductCall*>(calls[lane]->fragments[0]);
    if (other.a != call.a || other.b != call.b || other.accumulates != call.accumulates)
      fail(site, "the lanes' arguments differ");
    for (unsigned i = 0; i < 4 && call.a_registers != nullptr; ++i)
      std::memcpy(&product.operands[(lane / 4 + i % 2 * 8) * kDepth + lane % 4 * 2 + i / 2 * 8],
                  &other.a_registers[i], sizeof(unsigned));
  }
  check_warpgroup(product, warp);
  check_operands(product, warp);
  if (on_product != nullptr) on_product(product, warp);
  gather(product, warp, product.operands);
  SumsInFlight* sums = sums_in_flight(call.sums, 0);
  if (sums == nullptr) {
    mine.sums.push_back(take_sums(calls, call.count, site));
    sums = &mine.sums.back();
  } else if (sums->count != unsigned(call.count)) {
    fail(site, format("the sums have another shape than in {}, which is not complete", sums->site));
  }
  ++sums->products;
  mine.products.push_back(std::move(product));
}

void begin(const ProductCall& call, const Site& site) {
  check_fenced(call, site);
  meet({nullptr, 0, 0, {&call}}, site, begin_product);
}

void multiply_commit(const char* file, int line) {
  meet({}, {"multiply_commit", file, line},
       [](const MatrixCalls&, const Site&) { ++products_of_warp().group; });
}

// Computes sums of the warp's rows.
template <typename Format>
void compute(const Product& product, SumsInFlight& sums) {
  const Subnormals kept(false);
  const auto unpack = [&](unsigned row, Operands<kDepth>& to) {
    for (unsigned k = 0; k < kDepth; ++k)
      to.set(k, Format::decode(product.operands[row * kDepth + k]), Format::kLeast);
  };
  Operands<kDepth> a[kRows];
  for (unsigned row = 0; row < kRows; ++row) unpack(row, a[row]);
  for (unsigned column = 0; column < product.columns; ++column) {
    Operands<kDepth> b;
    unpack(kRows + column, b);
    for (unsigned row = 0; row < kRows; ++row) {
      const unsigned lane = row % 8 * 4 + column % 8 / 2;
      float& sum = sums.values[lane * sums.count + column / 8 * 4 + row / 8 * 2 + column % 2];
      sum = tensor_core_sum(product.accumulates ? sum : 0.0f, a[row], b);
    }
  }
}

inline void finish(const Product& product, unsigned warp) {
  Block& block = *this_fiber().block;
  std::vector<uint16_t> now = product.operands;
  gather(product, warp, now);
  if (now != product.operands)
    fail(product.site, "an operand was changed before the product had read it");
  if (block.races != nullptr) {
    for_each_chunk(product, warp, [&](const unsigned char* at, unsigned, unsigned, bool) {
      block.races->access(at, 16, AccessKind::kFetch, product.code);
    });
  }
  SumsInFlight& sums = *sums_in_flight(product.sums, 0);
  product.is_bfloat16 ? compute<BFloat16Format>(product, sums) : compute<HalfFormat>(product, sums);
  --sums.products;
  block.in_flight.progress();
}

inline bool has(const WaitCall& call, const float* variable) {
  const auto& [first, second] = call.sums;
  return offset(variable, first.first) < first.bytes ||
         offset(variable, second.first) < second.bytes;
}

// Gives complete sums to the threads' variables.
inline void give(const SumsInFlight& sums, const MatrixCalls& calls, const Site& site) {
  const Fiber& self = this_fiber();
  if (!is_poisoned(sums))
    fail(site, format("the sums of {} were written before they were complete", sums.site));
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    const auto& call = *static_cast<const WaitCall*>(calls[lane]->fragments[0]);
    if (!call.takes_all && !has(call, sums.variables[lane]))
      fail(site, format("the sums of {} are complete, and it does not take them", sums.site));
    for (unsigned i = 0; i < sums.count; ++i)
      sums.variable(lane, i) = sums.values[lane * sums.count + i];
    OfThread& thread = self.block->in_flight.threads[self.thread / kWarpSize * kWarpSize + lane];
    if (sums.each.empty()) {
      forget_fence(thread, sums.variables[lane]);
    } else {
      const float* const content = &sums.values[lane * sums.count];
      remember(thread, sums.variables[lane], content, sums.count * sizeof(float));
      thread.lacks_fence = true;
    }
  }
}

inline void finish_products(const MatrixCalls& calls, const Site& site) {
  const Fiber& self = this_fiber();
  const unsigned warp = self.thread / kWarpSize;
  ProductsOfWarp& mine = products_of_warp();
  const auto is_due = [&](const Product& product) {
    return product.group + calls[0]->leading_dimension < mine.group;
  };
  for (const Product& product : mine.products)
    if (is_due(product)) finish(product, warp);
  erase_if(mine.products, is_due);
  for (const SumsInFlight& sums : mine.sums)
    if (sums.products == 0) give(sums, calls, site);
  erase_if(mine.sums, [](const SumsInFlight& sums) { return sums.products == 0; });
  if (self.block->races != nullptr) self.block->races->share(warp * kWarpSize);
}

void wait(int groups, const WaitCall& call, const Site& site) {
  meet({nullptr, static_cast<unsigned>(groups), 0, {&call}}, site, finish_products);
  for (const SumsInFlight& sums : products_of_warp().sums) {
    if (has(call, sums.variables[this_fiber().thread % kWarpSize]))
      fail(site,
           format("the sums of {} are not complete: a product of them is in a later group, or "
                  "in none",
                  sums.site));
  }
}

}  // namespace attention::ptx
