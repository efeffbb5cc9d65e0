// Data movement of the collectives: through shared memory within hosts, on one ring per lane
// between hosts.
#ifndef SPARKDL_RING_COLLECTIVES_H_
#define SPARKDL_RING_COLLECTIVES_H_

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "sparkdl/collectives/blocks.h"
#include "sparkdl/collectives/ring.h"
#include "sparkdl/operation.h"
#include "sparkdl/operation_guard.h"
#include "sparkdl/shm/shm_group.h"
#include "sparkdl/status.h"
#include "sparkdl/tcp/wire_format.h"
#include "sparkdl/topology.h"

namespace sparkdl {

// Not thread-safe: one operation at a time. With several hosts, the ranks must have agreed on the
// operation beforehand. On one host, the first synchronisation of the operation finds out whether
// they agree; nothing is written before it.
class Collectives {
 public:
  // ring: this rank's lane; empty if it owns none. wire: format in which sums and averages of
  // float32 travel between hosts.
  Collectives(Topology topology, std::shared_ptr<Segment> segment, std::optional<Ring> ring,
              Dtype wire);

  // Runs an operation of any kind but kJoin. It may end without a synchronisation.
  Status Perform(const Operation& operation, OperationGuard& guard);

  ShmGroup& inside() { return inside_; }
  std::optional<Ring>& lane() { return lane_; }
  const Topology& topology() const { return topology_; }
  bool spans_hosts() const { return topology_.num_hosts() > 1; }
  size_t num_lanes() const { return static_cast<size_t>(topology_.num_lanes()); }

  // Closes the lane and releases the segment. No operation may run afterwards.
  void Release();

 private:
  class Exchanges;

  Status AllReduce(const Operation& operation, OperationGuard& guard);
  Status Reduce(const Operation& operation, OperationGuard& guard);
  Status ReduceScatter(const Operation& operation, OperationGuard& guard);
  Status AllGather(const Operation& operation, OperationGuard& guard);
  Status Broadcast(const Operation& operation, OperationGuard& guard);
  Status Gather(const Operation& operation, OperationGuard& guard);
  Status Scatter(const Operation& operation, OperationGuard& guard);
  Status AllToAll(const Operation& operation, OperationGuard& guard);
  Status Barrier(OperationGuard& guard);

  struct LaneChunk;
  Status AllReduceAcross(const Pieces& data, const Reduction& reduction, OperationGuard& guard);
  Status ReduceForLanes(LaneChunk& chunk, const Reduction& reduction, OperationGuard& guard);
  Status AllReduceOnLane(const LaneChunk& chunk, const Reduction& reduction, OperationGuard& guard);
  Status ReduceChunk(const Operation& operation, const Part& range, const Reduction& reduction,
                     OperationGuard& guard);
  Status ReduceScatterChunk(const std::vector<ConstPieces>& blocks, const Pieces& output,
                            const Part& range, const Reduction& reduction, OperationGuard& guard);
  Status AllToAllInside(const Operation& operation, const Exchanges& exchanges,
                        OperationGuard& guard);
  Status AllToAllAcross(const Operation& operation, const Exchanges& exchanges,
                        OperationGuard& guard);
  Status ExchangeCounts(const Operation& operation, Exchanges& exchanges, OperationGuard& guard);
  std::vector<Pieces> PartsOnLane(const Operation& operation, std::byte* whole,
                                  std::vector<std::byte>& staged) const;
  // Each lane's owner has its part of `data`; afterwards all ranks of this host have all of it.
  Status GatherLanes(const Pieces& data, size_t unit, OperationGuard& guard);
  // Sets `scaled` to the operation with its input multiplied by prescale. Includes the operation's
  // first synchronisation.
  Status Prescale(const Operation& operation, Operation& scaled, OperationGuard& guard);

  Reduction ReductionOf(const Operation& operation) const;
  Blocks BlocksOf(const Operation& operation) const {
    return {operation.counts, operation.count, BytesOf(operation.dtype), topology_.world_size()};
  }
  // By rank, the stream of its block: of `whole`, or of the arrays of a group.
  template <typename Byte>
  std::vector<std::vector<BasicPiece<Byte>>> StreamsOf(
      const Operation& operation, Byte* whole, const std::vector<BasicPiece<Byte>>& arrays) const {
    if (!operation.group.empty()) {
      return BlocksOfGroup(arrays, operation.group_counts, BytesOf(operation.dtype),
                           topology_.world_size());
    }
    const Blocks blocks = BlocksOf(operation);
    std::vector<std::vector<BasicPiece<Byte>>> streams;
    for (int rank = 0; rank < topology_.world_size(); ++rank) {
      streams.push_back({{whole + blocks.begin(rank), blocks.bytes(rank)}});
    }
    return streams;
  }
  bool owns_lane(size_t lane) const {
    return lane_.has_value() && static_cast<size_t>(topology_.local_rank()) == lane;
  }
  // Memory that is valid until the next call with the same `which`, 0 or 1.
  std::byte* Accumulators(size_t bytes, size_t which = 0);

  const Topology topology_;
  ShmGroup inside_;
  std::optional<Ring> lane_;
  const WireFormat* const wire_;
  std::array<std::vector<std::byte>, 2> accumulators_;
  std::vector<std::byte> scaled_;
};

}  // namespace sparkdl

#endif  // SPARKDL_RING_COLLECTIVES_H_
