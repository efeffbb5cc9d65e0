// Moving and reducing data between the ranks of one host through the shared segment.
#ifndef SPARKDL_SHM_SHM_GROUP_H_
#define SPARKDL_SHM_SHM_GROUP_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "sparkdl/operation_guard.h"
#include "sparkdl/pieces.h"
#include "sparkdl/reduce/reduce.h"
#include "sparkdl/shm/arena.h"
#include "sparkdl/shm/flag_board.h"
#include "sparkdl/shm/segment.h"
#include "sparkdl/shm/tile_mover.h"

namespace sparkdl {

// All methods are collective over the ranks of the host and must be called in the same way on each.
// A rank uses its slots in turn, so that one Sync() between writing and reading is enough: a rank
// that writes a slot for the second time has seen all ranks Sync() in a turn in between, so they
// have finished reading the first. An allreduce of two ranks publishes several turns ahead and
// needs more slots.
class ShmGroup {
 public:
  ShmGroup(std::shared_ptr<Segment> segment, int local_rank, std::vector<int> ranks);

  int size() const { return size_; }
  FlagBoard& board() { return board_; }

  // Releases the segment.
  void Release() {
    board_.Release();
    segment_.reset();
  }

  // BeginOperation() must be called before the first method of an operation, and GiveUpOperation()
  // after it if that method ended in a disagreement.
  void BeginOperation() { turn_at_begin_ = turn_; }
  void GiveUpOperation() { turn_ = TurnAfter(turn_at_begin_); }

  // Reduces count elements over all ranks, in place; every rank gets the same bits.
  Status AllReduce(std::byte* data, size_t count, const Reduction& reduction,
                   OperationGuard& guard) {
    return ReduceTo(kEverybody, data, count, reduction, guard);
  }

  // The same for arrays in an arena, at the same offsets on all ranks.
  Status AllReduceInArena(const Arena& arena, const Pieces& arrays, const Reduction& reduction,
                          OperationGuard& guard);

  // The same, but only the rank `root` of this host gets the result, in place; the others keep
  // their data.
  Status Reduce(int root, std::byte* data, size_t count, const Reduction& reduction,
                OperationGuard& guard) {
    return ReduceTo(root, data, count, reduction, guard);
  }

  // Rank i < streams.size() of this host receives the reduction of all ranks' streams[i] in
  // `output`, which has the length of that stream and may be that stream: as elements, or as
  // accumulators if to_accumulators. The pieces of streams must hold whole elements.
  struct ReduceTarget {
    Pieces output;
    bool to_accumulators = false;
  };
  Status ReduceScatter(const std::vector<ConstPieces>& streams, const ReduceTarget& target,
                       const Reduction& reduction, OperationGuard& guard);

  // Every rank publishes the stream `mine`; the stream of rank i goes to destinations[i], whose
  // lengths all ranks know. destinations[local_rank] is not written; only its length counts. `mine`
  // may be empty if no rank stores it.
  Status Gather(const ConstPieces& mine, const std::vector<Pieces>& destinations,
                OperationGuard& guard);

  // outgoing[i] goes to rank i, incoming[i] comes from it; this rank's own entries are not used.
  // longest: bytes of the longest stream of all ranks.
  Status Exchange(const std::vector<ConstPieces>& outgoing, const std::vector<Pieces>& incoming,
                  size_t longest, OperationGuard& guard);

 private:
  using Traffic = TileMovers::Traffic;

  static constexpr int kEverybody = -1;

  Status ReduceTo(int root, std::byte* data, size_t count, const Reduction& reduction,
                  OperationGuard& guard);
  Status AllReduceInOneRound(std::byte* data, size_t bytes, const Reduction& reduction,
                             OperationGuard& guard);
  Status ReduceInOneRound(int root, std::byte* data, size_t count, const Reduction& reduction,
                          OperationGuard& guard);
  Status ReduceTile(int root, std::byte* tile, size_t count, bool is_first,
                    const Reduction& reduction, OperationGuard& guard);
  std::byte* slot(int local_rank) const { return segment_->slot(local_rank, turn_); }
  TileMover BeginTile(const TileMovers::Tile& tile) const {
    if (size_ == 1) return {};
    TileMover mover = movers_.Begin(segment_->line(0).streaming, tile);
    mover.Start();
    return mover;
  }
  // Synchronises between publishing a tile and fetching the tiles of the others.
  Status SyncTile(TileMover& mover, OperationGuard& guard) {
    mover.BeginWait();
    SPARKDL_RETURN_IF_ERROR(board_.Sync(guard, movers_.DistanceDuring(mover)));
    mover.EndWait();
    return {};
  }
  void EndTile(TileMover& mover, size_t num_slots = 1) {
    mover.Flush();
    mover.Stop();
    if (size_ > 1) movers_.End(mover, segment_->line(0).streaming);
    turn_ = TurnAfter(turn_, num_slots);
  }
  static int TurnAfter(int turn, size_t turns = 1) {
    return static_cast<int>((static_cast<size_t>(turn) + turns) % Segment::kSlotsPerRank);
  }
  // Tiles of streams take two neighbouring slots, so that ranks wait half as often. They begin at
  // an even slot, because the last slot and the first are not neighbours.
  static constexpr size_t kSlotsOfStreamTile = 2;
  static constexpr size_t kStreamTileBytes = kSlotsOfStreamTile * Segment::kSlotBytes;
  static_assert(Segment::kSlotsPerRank % kSlotsOfStreamTile == 0);
  void BeginStreams() {
    const size_t used = static_cast<size_t>(turn_) % kSlotsOfStreamTile;
    if (used > 0) turn_ = TurnAfter(turn_, kSlotsOfStreamTile - used);
  }

  std::shared_ptr<Segment> segment_;
  const int local_rank_;
  const int size_;
  FlagBoard board_;
  TileMovers movers_;
  int turn_ = 0;
  int turn_at_begin_ = 0;
  std::vector<const void*> sources_;
};

}  // namespace sparkdl

#endif  // SPARKDL_SHM_SHM_GROUP_H_
