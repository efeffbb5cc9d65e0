// Moving and reducing data between the ranks of one host through the shared segment.
#ifndef SPARKDL_SHM_GROUP_H_
#define SPARKDL_SHM_GROUP_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "sparkdl/flag_board.h"
#include "sparkdl/operation_guard.h"
#include "sparkdl/pieces.h"
#include "sparkdl/reduce.h"
#include "sparkdl/segment.h"

namespace sparkdl {

// All methods are collective over the ranks of the host and must be called alike on each. A rank's
// two slots take turns, so that one Sync() between writing and reading is enough: who writes a slot
// for the second time has seen everybody Sync() in the turn between, hence be done with reading the
// first.
class ShmGroup {
 public:
  ShmGroup(std::shared_ptr<Segment> segment, int local_rank, std::vector<int> ranks);

  int size() const { return size_; }
  FlagBoard& board() { return board_; }

  // Lets go of the segment.
  void Release() {
    board_.Release();
    segment_.reset();
  }

  // Reduces count elements of all ranks, in place, identically on every rank.
  Status AllReduce(std::byte* data, size_t count, const ReduceKernels& kernels, uint64_t divisor,
                   OperationGuard& guard);

  // Rank i < streams.size() receives the reduction of everybody's streams[i] in `output` (its own
  // stream's length; may be its own stream itself): elements, or accumulators if to_accumulators.
  // Streams must break at whole elements.
  struct ReduceTarget {
    Pieces output;
    bool to_accumulators = false;
    uint64_t divisor = 1;
  };
  Status ReduceScatter(const std::vector<ConstPieces>& streams, const ReduceTarget& target,
                       const ReduceKernels& kernels, OperationGuard& guard);

  // Every rank publishes the stream `mine`; the stream of rank i goes to destinations[i], whose
  // lengths everybody knows. destinations[local_rank] is not written, only its length counts.
  Status Gather(const ConstPieces& mine, const std::vector<Pieces>& destinations,
                OperationGuard& guard);

 private:
  Status ReduceInOneRound(std::byte* data, size_t count, const ReduceKernels& kernels,
                          uint64_t divisor, OperationGuard& guard);
  Status ReduceTile(std::byte* tile, size_t count, const ReduceKernels& kernels, uint64_t divisor,
                    OperationGuard& guard);
  std::byte* slot(int local_rank) const { return segment_->slot(local_rank, turn_); }
  void EndTurn() { turn_ ^= 1; }

  std::shared_ptr<Segment> segment_;
  const int local_rank_;
  const int size_;
  FlagBoard board_;
  int turn_ = 0;
  std::vector<const void*> sources_;
};

}  // namespace sparkdl

#endif  // SPARKDL_SHM_GROUP_H_
