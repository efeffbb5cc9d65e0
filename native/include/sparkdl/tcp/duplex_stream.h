// Sending to one neighbour while receiving from the other.
#ifndef SPARKDL_TCP_DUPLEX_STREAM_H_
#define SPARKDL_TCP_DUPLEX_STREAM_H_

#include <cstddef>
#include <vector>

#include "sparkdl/operation_guard.h"
#include "sparkdl/pieces.h"
#include "sparkdl/reduce/reduce.h"
#include "sparkdl/status.h"
#include "sparkdl/tcp/fork_guard.h"
#include "sparkdl/tcp/wire_format.h"

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
  // Null: the bytes travel as they lie in memory. Otherwise they are float32, and every piece holds
  // whole ones.
  const WireFormat* wire = nullptr;
};

class DuplexStream {
 public:
  // Takes the sockets over; they must be non-blocking.
  DuplexStream(GuardedSocket to_next, GuardedSocket from_previous, int next_rank,
               int previous_rank);

  Status Run(const DuplexTransfer& transfer, OperationGuard& guard);

 private:
  struct Progress;

  Status SendSome(Progress& progress, OperationGuard& guard, bool& has_moved);
  size_t PackSome(Progress& progress);
  Status ReceiveSome(Progress& progress, OperationGuard& guard, bool& has_moved);
  Status ReceiveInto(Pieces& window, OperationGuard& guard, size_t& received);
  void TakeStaged(Progress& progress);
  std::byte* Unpacked(size_t bytes);
  Status Sleep(const Progress& progress, OperationGuard& guard);

  GuardedSocket to_next_;
  GuardedSocket from_previous_;
  const int next_rank_;
  const int previous_rank_;
  std::vector<std::byte> staging_;   // what came and is not combined or unpacked yet
  std::vector<std::byte> unpacked_;  // what is to be combined
  std::vector<std::byte> packed_;    // what is to be sent
};

}  // namespace sparkdl

#endif  // SPARKDL_TCP_DUPLEX_STREAM_H_
