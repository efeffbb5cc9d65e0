// Collectives over the hosts, on one lane: a ring of sockets through one rank of every host.
#ifndef SPARKDL_RING_H_
#define SPARKDL_RING_H_

#include <cstddef>
#include <functional>
#include <vector>

#include "sparkdl/duplex_stream.h"
#include "sparkdl/operation_guard.h"
#include "sparkdl/pieces.h"
#include "sparkdl/reduce.h"
#include "sparkdl/status.h"

namespace sparkdl {

// Every method is collective over the owners of the lane. Blocks are numbered by host.
class Ring {
 public:
  Ring(DuplexStream stream, int rank, int host, int num_hosts);

  // Tells the next host what this rank is about to do and hears it from the previous one.
  Status Begin(OperationGuard& guard);

  // blocks: accumulators. Afterwards this host's block holds everybody's; the others are undefined.
  // The partial results of a block travel from the host after its own around to it, so the order of
  // reduction depends on the block alone.
  Status ReduceScatter(const std::vector<Pieces>& blocks, const ReduceKernels& kernels,
                       OperationGuard& guard);

  // Each host has its own block; afterwards all have all.
  Status AllGather(const std::vector<Pieces>& blocks, OperationGuard& guard);

  // The data of the root's host goes to all.
  Status Broadcast(const Piece& data, int root_host, OperationGuard& guard);

  Status Barrier(OperationGuard& guard);

 private:
  // Host index `steps` back on the ring.
  int HostBefore(int steps) const { return (host_ + steps * (num_hosts_ - 1)) % num_hosts_; }

  DuplexStream stream_;
  const int rank_;
  const int host_;
  const int num_hosts_;
};

}  // namespace sparkdl

#endif  // SPARKDL_RING_H_
