// Collectives over the hosts, on one lane: a ring of sockets through one rank of every host.
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

// Every method is collective over the owners of the lane. Blocks are numbered by host.
class Ring {
 public:
  // ranks: the owner of the lane on each host.
  Ring(DuplexStream stream, int host, std::vector<int> ranks);

  // Whether all hosts say that they agree inside, and are about to do the same.
  Result<bool> Agree(bool agrees, OperationGuard& guard);

  // blocks: accumulators. Afterwards this host's block holds everybody's; the others are undefined.
  // The partial results of a block travel from the host after its own around to it, so the order of
  // reduction depends on the block alone.
  Status ReduceScatter(const std::vector<Pieces>& blocks, const Reduction& reduction,
                       OperationGuard& guard);

  // data: accumulators. Afterwards the root's host holds everybody's; the others are undefined.
  Status Reduce(const Pieces& data, int root_host, const Reduction& reduction,
                OperationGuard& guard);

  // Each host has its own block; afterwards all have all, as the wire format rounds it if there is
  // one.
  Status AllGather(const std::vector<Pieces>& blocks, OperationGuard& guard,
                   const WireFormat* wire = nullptr);

  // The data of the root's host goes to all.
  Status Broadcast(const Piece& data, int root_host, OperationGuard& guard);

  // Each host has its own block; afterwards the root's host has all. Elsewhere the other blocks are
  // only passed through: they have sizes and no memory.
  Status Gather(const std::vector<Pieces>& blocks, int root_host, OperationGuard& guard);

  // The root's host has all blocks; afterwards each host has its own.
  Status Scatter(const std::vector<Pieces>& blocks, int root_host, OperationGuard& guard);

  // outgoing[h] goes to host h, incoming[h] comes from there. bytes(a, b): how much goes from host
  // a to host b.
  Status AllToAll(const std::vector<ConstPieces>& outgoing, const std::vector<Pieces>& incoming,
                  const std::function<size_t(int, int)>& bytes, OperationGuard& guard);

 private:
  // Host index `steps` back on the ring.
  int HostBefore(int steps) const { return (host_ + steps * (num_hosts_ - 1)) % num_hosts_; }
  // How many hops this host, or another, is after the root's.
  int DistanceFrom(int root_host) const { return (host_ - root_host + num_hosts_) % num_hosts_; }

  DuplexTransfer AllGatherOf(const std::vector<Pieces>& blocks) const;

  DuplexStream stream_;
  const int host_;
  const std::vector<int> ranks_;
  const int num_hosts_;
};

}  // namespace sparkdl

#endif  // SPARKDL_RING_RING_H_
