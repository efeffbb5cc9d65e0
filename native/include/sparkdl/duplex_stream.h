// Sending to one neighbour while receiving from the other.
#ifndef SPARKDL_DUPLEX_STREAM_H_
#define SPARKDL_DUPLEX_STREAM_H_

#include <cstddef>
#include <vector>

#include "sparkdl/fork_guard.h"
#include "sparkdl/operation_guard.h"
#include "sparkdl/pieces.h"
#include "sparkdl/reduce.h"
#include "sparkdl/status.h"

namespace sparkdl {

// What one pass over the ring sends and receives, both known in full beforehand.
struct DuplexTransfer {
  ConstPieces outgoing;
  // So many bytes may leave at once; each byte that arrived (and was reduced) frees one more. A
  // ring step's outgoing data is the step before's incoming data, so the passes of a ring overlap
  // by themselves, at any grain.
  size_t outgoing_credit = 0;
  Pieces incoming;
  // Null: incoming bytes are stored. Otherwise they are accumulators to combine with what is there.
  const ReduceKernels* combine_with = nullptr;
  // Whether this is the first that the neighbours hear of an operation.
  bool begins_operation = false;
};

class DuplexStream {
 public:
  // Takes the sockets over; they must be non-blocking. previous_is_alone: no other rank of its host
  // can be the reason that the previous one does not join.
  DuplexStream(GuardedSocket to_next, GuardedSocket from_previous, int next_rank, int previous_rank,
               bool previous_is_alone);

  Status Run(const DuplexTransfer& transfer, OperationGuard& guard);

  int previous_rank() const { return previous_rank_; }
  int next_rank() const { return next_rank_; }

 private:
  struct Progress;

  Status SendSome(Progress& progress, OperationGuard& guard, bool& has_moved);
  Status ReceiveSome(Progress& progress, OperationGuard& guard, bool& has_moved);
  Status ReceiveInto(Pieces& window, OperationGuard& guard, size_t& received);
  void CombineStaged(Progress& progress);
  Status Sleep(const Progress& progress, OperationGuard& guard);
  Status Missed(const Progress& progress, OperationGuard& guard) const;

  GuardedSocket to_next_;
  GuardedSocket from_previous_;
  const int next_rank_;
  const int previous_rank_;
  const bool previous_is_alone_;
  std::vector<std::byte> staging_;
};

}  // namespace sparkdl

#endif  // SPARKDL_DUPLEX_STREAM_H_
