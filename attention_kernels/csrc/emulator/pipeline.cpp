// Asynchronous copies of threads: see cuda_pipeline.h.

namespace attention::emulator {

PendingCopy& pending_copy(void* to, const void* from, size_t size, size_t zeros, const Site& site) {
  Block& block = *this_fiber().block;
  const char* wrong = nullptr;
  if ((size != 4 && size != 8 && size != 16) || zeros > size) {
    wrong = "4, 8 or 16 bytes can be copied";
  } else if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % size != 0) {
    wrong = "an address is not a multiple of the size";
  } else if (block.shared.fixed != nullptr && !block.shared.has(to)) {
    wrong = "the destination is not in shared memory";
  }
  if (wrong != nullptr) fail(site, wrong, cudaErrorMisalignedAddress);
  return block.own().copies.emplace_back(PendingCopy{to, size, {}});
}

void set(PendingCopy& copy, const void* data, size_t bytes) { std::memcpy(copy.data, data, bytes); }

}  // namespace attention::emulator

void __pipeline_commit() {
  attention::emulator::this_fiber().block->own().copies.push_back({nullptr, 0, {}});
}

void __pipeline_wait_prior(size_t prior) {
  using namespace attention::emulator;
  Block& block = *this_fiber().block;
  auto& copies = block.own().copies;
  const auto is_end = [](const PendingCopy& copy) { return copy.size == 0; };
  auto copy = copies.begin();
  for (size_t left = std::count_if(copy, copies.end(), is_end); left > prior; ++copy) {
    if (is_end(*copy)) {
      --left;
      continue;
    }
    if (block.races != nullptr)
      block.races->access(copy->to, copy->size, AccessKind::kWrite, __builtin_return_address(0));
    std::memcpy(copy->to, copy->data, copy->size);
  }
  copies.erase(copies.begin(), copy);
}
