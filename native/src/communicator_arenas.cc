// Arenas of a communicator.
#include <algorithm>

#include "sparkdl/communicator.h"

namespace sparkdl {

Result<std::shared_ptr<const Arena>> Communicator::AddArena(int fd, size_t part_bytes) {
  SPARKDL_RETURN_IF_ERROR(CheckProcess());
  const std::scoped_lock lock(arenas_mutex_);
  auto arena = Arena::Attach(fd, part_bytes, topology_.local_rank(), topology_.local_size(),
                             static_cast<int>(arenas_.size()));
  if (!arena.ok()) return arena.status();
  arenas_.push_back(arena.value());
  has_arenas_.store(true, std::memory_order_release);
  return arena;
}

void Communicator::Locate(Operation& operation) const {
  // Between hosts, data is sent as streams, wherever it lies.
  if (operation.kind != OpKind::kAllReduce || operation.count == 0) return;
  if (topology_.num_hosts() > 1) return;
  if (!has_arenas_.load(std::memory_order_acquire)) return;
  const Pieces arrays = ArraysOf(operation);
  const std::scoped_lock lock(arenas_mutex_);
  for (const auto& candidate : arenas_) {
    auto arena = candidate.lock();
    if (arena == nullptr) continue;
    const bool holds_all = std::ranges::all_of(
        arrays, [&](const Piece& array) { return arena->Holds(array.data, array.bytes); });
    if (!holds_all) continue;
    operation.arena = std::move(arena);
    return;
  }
}

}  // namespace sparkdl
