#include "sparkdl/shm/shm_group.h"

#include <algorithm>
#include <array>
#include <utility>

#include "sparkdl/copy.h"

namespace sparkdl {
namespace {

// Up to this size every rank reduces everything, with one synchronisation instead of two. Beyond
// it, reading the data of all peers costs more than the second synchronisation.
constexpr size_t kOneRoundBytes = size_t{16} * 1024;

// With two ranks, one round reads no more of the peer's data than two rounds. Tiles of this size
// (the one that is being reduced, the one that is published ahead, and the peer's) stay in the
// second-level cache.
constexpr size_t kOneRoundTileBytes = size_t{128} * 1024;

// Number of tiles that a rank publishes ahead of the one that it reduces. Data written by streaming
// stores takes a while to reach memory, and a peer that reads it at once has to wait for that: 15 %
// of an allreduce on Zen 4.
constexpr size_t kAhead = 1;
constexpr size_t kAheadStreaming = 3;
// A rank that writes a slot has seen the peer publish the tile kAheadStreaming + 1 before that one,
// so the peer is done with the tile that many before it.
static_assert(Segment::kSlotsPerRank >= 2 * (kAheadStreaming + 1),
              "a rank would write what its peers still read");

static_assert(kOneRoundTileBytes <= Segment::kSlotBytes);

// A rank reduces and publishes its slice piece by piece, while each piece is in the first-level
// cache.
constexpr size_t kPushBytes = size_t{16} * 1024;

// Slices begin at cache lines, so that no two ranks write the same one.
constexpr size_t kSliceUnit = 64;

// Identifies reductions whose times are comparable.
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
  // Rounding up makes only the last slice of a tile shorter, so all slices fit the slot.
  const size_t tile = Segment::kSlotBytes / element_bytes;
  for (size_t done = 0; done < count; done += tile) {
    SPARKDL_RETURN_IF_ERROR(ReduceTile(root, data + done * element_bytes,
                                       std::min(tile, count - done), done == 0, reduction, guard));
  }
  return {};
}

// One-shot: every rank publishes everything and reduces everything. A tile is published before the
// previous one is reduced, so that ranks seldom wait for their peers.
Status ShmGroup::AllReduceInOneRound(std::byte* data, size_t bytes, const Reduction& reduction,
                                     OperationGuard& guard) {
  if (bytes == 0) return {};
  struct Flight {
    TileMover mover;
    uint32_t phase = 0;
  };
  std::array<Flight, kAheadStreaming + 1> flights;
  TileMovers::Published& published = segment_->line(0).streaming;
  const size_t num_tiles = (bytes - 1) / kOneRoundTileBytes + 1;
  const auto flight_of = [&](size_t tile) -> Flight& { return flights[tile % flights.size()]; };
  const auto bytes_of = [&](size_t tile) {
    return std::min(kOneRoundTileBytes, bytes - tile * kOneRoundTileBytes);
  };
  const auto slot_of = [&](int rank, size_t tile) {
    return segment_->slot(rank, TurnAfter(turn_, tile));
  };
  const auto begin = [&](size_t tile) {
    return movers_.Begin(published, {.traffic = Traffic::kAllReduce,
                                     .bytes = bytes_of(tile),
                                     .work = WorkOf(reduction, kEverybody),
                                     .is_first = tile == 0});
  };
  const auto publish = [&](const TileMover& mover, size_t tile) {
    mover.Copy(slot_of(local_rank_, tile), data + tile * kOneRoundTileBytes, bytes_of(tile));
    mover.Flush();
    return board_.Arrive();
  };
  Flight& first = flight_of(0);
  first.mover = begin(0);
  first.mover.Start();
  first.phase = publish(first.mover, 0);
  // No rank may publish another tile before the ranks know that they agree.
  first.mover.BeginWait();
  SPARKDL_RETURN_IF_ERROR(board_.Await(first.phase, guard, movers_.DistanceDuring(first.mover)));
  first.mover.EndWait();
  size_t num_published = 1;
  for (size_t tile = 0; tile < num_tiles; ++tile) {
    auto& [mover, phase] = flight_of(tile);
    const size_t ahead = mover.stores() == Stores::kStreaming ? kAheadStreaming : kAhead;
    for (; num_published < std::min(num_tiles, tile + 1 + ahead); ++num_published) {
      Flight& next = flight_of(num_published);
      next.mover = begin(num_published);
      mover.HandOverTo(next.mover);
      next.phase = publish(next.mover, num_published);
      next.mover.HandOverTo(mover);
    }
    if (tile > 0) {
      SPARKDL_RETURN_IF_ERROR(board_.Await(phase, guard, movers_.DistanceDuring(mover)));
    }
    for (int other = 0; other < size_; ++other) sources_[other] = slot_of(other, tile);
    std::byte* const reduced = data + tile * kOneRoundTileBytes;
    sources_[local_rank_] = reduced;
    reduction.kernels.reduce(reduced, sources_.data(), sources_.size(),
                             bytes_of(tile) / reduction.kernels.element_bytes, reduction.finish);
    if (tile + 1 < num_tiles) {
      mover.HandOverTo(flight_of(tile + 1).mover);
    } else {
      mover.Stop();
    }
    movers_.End(mover, published);
  }
  turn_ = TurnAfter(turn_, num_tiles);
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
  turn_ = TurnAfter(turn_);
  return {};
}

// Two-shot: each rank reduces one slice of the tile, reading its own part in place, and writes the
// result to its slot, from which the others fetch it.
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
  SPARKDL_RETURN_IF_ERROR(SyncTile(mover, guard));

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

// Each rank reduces one slice of every array, reading it from the parts of all ranks and writing it
// to all of them: a rank reads and writes as many bytes as the arrays have.
Status ShmGroup::AllReduceInArena(const Arena& arena, const Pieces& arrays,
                                  const Reduction& reduction, OperationGuard& guard) {
  const size_t element_bytes = reduction.kernels.element_bytes;
  SPARKDL_RETURN_IF_ERROR(board_.Sync(guard));
  for (const Piece& array : arrays) {
    const size_t begin = arena.OffsetOf(array.data);
    const Part mine = PartOf(array.bytes, static_cast<size_t>(size_),
                             static_cast<size_t>(local_rank_), kSliceUnit);
    for (size_t done = 0; done < mine.size; done += kPushBytes) {
      // Ranks that have given up may use their arrays again.
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
