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

// What one pass over the ring sends and receives; both are known in full beforehand.
struct DuplexTransfer {
  ConstPieces outgoing;
  // Number of bytes that may be sent at once. Each byte that was received (and reduced) allows one
  // more. The outgoing data of a ring step is the incoming data of the step before, so the steps of
  // a pass overlap by themselves, at any granularity.
  size_t outgoing_credit = 0;
  Pieces incoming;
  // If null, incoming bytes are stored. Otherwise they are accumulators, to be combined with those
  // in memory.
  const ReduceKernels* combine_with = nullptr;
  // If null, bytes travel as they are in memory. Otherwise they are float32, and every piece holds
  // whole ones.
  const WireFormat* wire = nullptr;
};

class DuplexStream {
 public:
  // Takes ownership of the sockets, which must be non-blocking.
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
  std::vector<std::byte> staging_;   // received, and not yet combined or unpacked
  std::vector<std::byte> unpacked_;  // unpacked, to be combined
  std::vector<std::byte> packed_;    // packed, to be sent
};

}  // namespace sparkdl

#endif  // SPARKDL_TCP_DUPLEX_STREAM_H_
