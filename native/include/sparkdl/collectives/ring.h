// Collectives between hosts on one lane: a ring of sockets through one rank of every host.
#ifndef SPARKDL_RING_RING_H_
#define SPARKDL_RING_RING_H_

#include <cstddef>
#include <functional>
#include <vector>

#include "sparkdl/operation_guard.h"
#include "sparkdl/pieces.h"
#include "sparkdl/reduce/reduce.h"
#include "sparkdl/status.h"
#include "sparkdl/tcp/duplex_stream.h"

namespace sparkdl {

// Every method is collective over the owners of the lane. Blocks are indexed by host.
class Ring {
 public:
  // ranks: owner of the lane on each host.
  Ring(DuplexStream stream, int host, std::vector<int> ranks);

  // True if on every host the ranks agree, as `agrees` says for this one, and all hosts call the
  // same operation.
  Result<bool> Agree(bool agrees, OperationGuard& guard);

  // blocks: accumulators. Afterwards this host's block holds the reduction over all hosts; the
  // other blocks are undefined. The partial results of a block travel around the ring, from the
  // host after its own to its own, so the order of reduction depends only on the block.
  Status ReduceScatter(const std::vector<Pieces>& blocks, const Reduction& reduction,
                       OperationGuard& guard);

  // data: accumulators. Afterwards the root's host holds the reduction over all hosts; the data of
  // other hosts is undefined.
  Status Reduce(const Pieces& data, int root_host, const Reduction& reduction,
                OperationGuard& guard);

  // Each host has its own block; afterwards all hosts have all blocks, rounded to the wire format
  // if there is one.
  Status AllGather(const std::vector<Pieces>& blocks, OperationGuard& guard,
                   const WireFormat* wire = nullptr);

  // Sends the data of the root's host to all hosts.
  Status Broadcast(const Piece& data, int root_host, OperationGuard& guard);

  // Each host has its own block; afterwards the root's host has all blocks. On other hosts the
  // blocks of others only pass through: they have sizes but no memory.
  Status Gather(const std::vector<Pieces>& blocks, int root_host, OperationGuard& guard);

  // The root's host has all blocks; afterwards each host has its own.
  Status Scatter(const std::vector<Pieces>& blocks, int root_host, OperationGuard& guard);

  // outgoing[h] goes to host h, incoming[h] comes from it. bytes(a, b): number of bytes that host a
  // sends to host b.
  Status AllToAll(const std::vector<ConstPieces>& outgoing, const std::vector<Pieces>& incoming,
                  const std::function<size_t(int, int)>& bytes, OperationGuard& guard);

 private:
  // Index of the host that is `steps` before this one on the ring.
  int HostBefore(int steps) const { return (host_ + steps * (num_hosts_ - 1)) % num_hosts_; }
  // Number of hops from the root's host to this one.
  int DistanceFrom(int root_host) const { return (host_ - root_host + num_hosts_) % num_hosts_; }

  DuplexTransfer AllGatherOf(const std::vector<Pieces>& blocks) const;

  DuplexStream stream_;
  const int host_;
  const std::vector<int> ranks_;
  const int num_hosts_;
};

}  // namespace sparkdl

#endif  // SPARKDL_RING_RING_H_
