#include "sparkdl/shm_group.h"

#include <algorithm>
#include <utility>

#include "sparkdl/copy.h"

namespace sparkdl {
namespace {

// Up to here everybody reduces everything: one synchronisation instead of two. Beyond, reading all
// peers' data costs more than the second one.
constexpr size_t kOneRoundBytes = size_t{16} * 1024;

// With two ranks there is no more of the peer's data to read in one round than in two. Tiles of
// this size, the one that is reduced, the one that is published ahead and the peer's, stay in the
// second-level cache.
constexpr size_t kOneRoundTileBytes = size_t{128} * 1024;

// A rank reduces its slice and hands it on piece by piece, while it is in the first-level cache.
constexpr size_t kPushBytes = size_t{16} * 1024;

// Slices begin at cache lines, so that no two ranks write the same one.
constexpr size_t kSliceUnit = 64;

// What makes one reduction take another time than the next.
uint64_t WorkOf(const Reduction& reduction, int root) {
  const uint64_t is_scaled = reduction.finish.factor != 1.0 ? uint64_t{1} << 63 : 0;
  return (reinterpret_cast<uintptr_t>(&reduction.kernels) + static_cast<uint64_t>(root) + 1) |
         is_scaled;
}

}  // namespace

ShmGroup::ShmGroup(std::shared_ptr<Segment> segment, int local_rank, std::vector<int> ranks)
    : segment_(std::move(segment)),
      local_rank_(local_rank),
      size_(static_cast<int>(ranks.size())),
      board_(segment_, local_rank, std::move(ranks)),
      movers_(local_rank == 0),
      sources_(static_cast<size_t>(size_)) {}

Status ShmGroup::ReduceTo(int root, std::byte* data, size_t count, const Reduction& reduction,
                          OperationGuard& guard) {
  if (size_ == 1) {
    if (reduction.finish.factor != 1.0) {
      reduction.kernels.scale(data, data, count, reduction.finish.factor);
    }
    return {};
  }
  const size_t element_bytes = reduction.kernels.element_bytes;
  const size_t bytes = count * element_bytes;
  if (root == kEverybody && size_ == 2 && reduction.IsAsFastAsMemory()) {
    return AllReduceInOneRound(data, bytes, reduction, guard);
  }
  if (bytes * static_cast<size_t>(size_) <= 2 * kOneRoundBytes) {
    return ReduceInOneRound(root, data, count, reduction, guard);
  }
  // The last slice of a tile is the one that rounding up leaves shorter, so all slices fit the
  // slot.
  const size_t tile = Segment::kSlotBytes / element_bytes;
  for (size_t done = 0; done < count; done += tile) {
    SPARKDL_RETURN_IF_ERROR(ReduceTile(root, data + done * element_bytes,
                                       std::min(tile, count - done), done == 0, reduction, guard));
  }
  return {};
}

// One-shot: everybody publishes everything and reduces everything. A tile is published before the
// one ahead of it is reduced, so that the peers are seldom waited for.
Status ShmGroup::AllReduceInOneRound(std::byte* data, size_t bytes, const Reduction& reduction,
                                     OperationGuard& guard) {
  static_assert(Segment::kSlotsPerRank >= 4, "a rank would write what its peers still read");
  static_assert(kOneRoundTileBytes <= Segment::kSlotBytes);
  if (bytes == 0) return {};
  TileMovers::Published& published = segment_->line(0).streaming;
  const auto begin = [&](size_t offset) {
    return movers_.Begin(published, {.traffic = Traffic::kAllReduce,
                                     .bytes = std::min(kOneRoundTileBytes, bytes - offset),
                                     .work = WorkOf(reduction, kEverybody),
                                     .is_first = offset == 0});
  };
  const auto publish = [&](const TileMover& mover, int turn, size_t offset) {
    mover.Copy(segment_->slot(local_rank_, turn), data + offset,
               std::min(kOneRoundTileBytes, bytes - offset));
    mover.Flush();
    return board_.Arrive();
  };
  TileMover mover = begin(0);
  mover.Start();
  uint32_t phase = publish(mover, turn_, 0);
  // Before the ranks know that they agree, none may publish another.
  mover.BeginWait();
  SPARKDL_RETURN_IF_ERROR(board_.Await(phase, guard));
  mover.EndWait();
  for (size_t done = 0; done < bytes; done += kOneRoundTileBytes) {
    const size_t next = done + kOneRoundTileBytes;
    TileMover next_mover;
    uint32_t next_phase = phase;
    if (next < bytes) {
      next_mover = begin(next);
      mover.HandOverTo(next_mover);
      next_phase = publish(next_mover, TurnAfter(turn_), next);
      next_mover.HandOverTo(mover);
    }
    if (done > 0) SPARKDL_RETURN_IF_ERROR(board_.Await(phase, guard));
    for (int other = 0; other < size_; ++other) sources_[other] = slot(other);
    sources_[local_rank_] = data + done;
    const size_t tile = std::min(kOneRoundTileBytes, bytes - done);
    reduction.kernels.reduce(data + done, sources_.data(), sources_.size(),
                             tile / reduction.kernels.element_bytes, reduction.finish);
    mover.HandOverTo(next_mover);
    movers_.End(mover, published);
    EndTurn();
    mover = next_mover;
    phase = next_phase;
  }
  return {};
}

Status ShmGroup::ReduceInOneRound(int root, std::byte* data, size_t count,
                                  const Reduction& reduction, OperationGuard& guard) {
  CopyBytes(slot(local_rank_), data, count * reduction.kernels.element_bytes);
  SPARKDL_RETURN_IF_ERROR(board_.Sync(guard));
  if (root == kEverybody || root == local_rank_) {
    for (int other = 0; other < size_; ++other) sources_[other] = slot(other);
    sources_[local_rank_] = data;
    reduction.kernels.reduce(data, sources_.data(), sources_.size(), count, reduction.finish);
  }
  EndTurn();
  return {};
}

// Two-shot: each rank reduces one slice of the tile, reading its own part where it is, and pushes
// the result into its slot, from where the others fetch it.
Status ShmGroup::ReduceTile(int root, std::byte* tile, size_t count, bool is_first,
                            const Reduction& reduction, OperationGuard& guard) {
  const size_t element_bytes = reduction.kernels.element_bytes;
  const bool keeps_result = root == kEverybody || root == local_rank_;
  const auto slice_of = [&](int rank) {
    return PartOf(count * element_bytes, static_cast<size_t>(size_), static_cast<size_t>(rank),
                  kSliceUnit);
  };
  std::byte* const my_slot = slot(local_rank_);
  TileMover mover =
      BeginTile({.traffic = root == kEverybody ? Traffic::kAllReduce : Traffic::kReduce,
                 .bytes = count * element_bytes,
                 .work = WorkOf(reduction, root),
                 .is_first = is_first});
  for (int step = 1; step < size_; ++step) {
    const Part part = slice_of((local_rank_ + step) % size_);
    mover.Copy(my_slot + part.begin, tile + part.begin, part.size);
  }
  mover.BeginWait();
  SPARKDL_RETURN_IF_ERROR(board_.Sync(guard));
  mover.EndWait();

  const Part mine = slice_of(local_rank_);
  for (size_t done = 0; done < mine.size; done += kPushBytes) {
    const size_t offset = mine.begin + done;
    const size_t bytes = std::min(kPushBytes, mine.size - done);
    for (int other = 0; other < size_; ++other) sources_[other] = slot(other) + offset;
    sources_[local_rank_] = tile + offset;
    std::byte* const reduced = keeps_result ? tile + offset : my_slot + offset;
    reduction.kernels.reduce(reduced, sources_.data(), sources_.size(), bytes / element_bytes,
                             reduction.finish);
    if (root != local_rank_) mover.Copy(my_slot + offset, reduced, bytes);
  }
  mover.Flush();
  SPARKDL_RETURN_IF_ERROR(board_.Sync(guard));

  for (int step = 1; step < size_ && keeps_result; ++step) {
    const int other = (local_rank_ + step) % size_;
    const Part part = slice_of(other);
    mover.Copy(tile + part.begin, slot(other) + part.begin, part.size);
  }
  EndTile(mover);
  return {};
}

// Each rank reduces one slice of every array from where all ranks have it to where all ranks want
// it: a rank reads and writes as many bytes as the arrays have.
Status ShmGroup::AllReduceInArena(const Arena& arena, const Pieces& arrays,
                                  const Reduction& reduction, OperationGuard& guard) {
  const size_t element_bytes = reduction.kernels.element_bytes;
  SPARKDL_RETURN_IF_ERROR(board_.Sync(guard));
  for (const Piece& array : arrays) {
    const size_t begin = arena.OffsetOf(array.data);
    const Part mine = PartOf(array.bytes, static_cast<size_t>(size_),
                             static_cast<size_t>(local_rank_), kSliceUnit);
    for (size_t done = 0; done < mine.size; done += kPushBytes) {
      // Their owners may use the arrays again once they have given up.
      if (guard.has_failure()) return guard.Check();
      const size_t offset = begin + mine.begin + done;
      const size_t bytes = std::min(kPushBytes, mine.size - done);
      for (int other = 0; other < size_; ++other) sources_[other] = arena.part(other) + offset;
      std::byte* const reduced = arena.part(local_rank_) + offset;
      reduction.kernels.reduce(reduced, sources_.data(), sources_.size(), bytes / element_bytes,
                               reduction.finish);
      for (int step = 1; step < size_; ++step) {
        CopyBytes(arena.part((local_rank_ + step) % size_) + offset, reduced, bytes);
      }
    }
  }
  return board_.Sync(guard);
}

}  // namespace sparkdl
