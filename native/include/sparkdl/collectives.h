// The collectives over all ranks: inside hosts by shared memory, across hosts by one ring per lane.
#ifndef SPARKDL_COLLECTIVES_H_
#define SPARKDL_COLLECTIVES_H_

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "sparkdl/operation.h"
#include "sparkdl/operation_guard.h"
#include "sparkdl/ring.h"
#include "sparkdl/shm_group.h"
#include "sparkdl/status.h"
#include "sparkdl/topology.h"

namespace sparkdl {

// Not thread-safe: one operation at a time.
class Collectives {
 public:
  // ring: this rank's lane; empty if it owns none.
  Collectives(Topology topology, std::shared_ptr<Segment> segment, std::optional<Ring> ring);

  // Runs the operation of guard.signature(). The operation was validated.
  Status Run(const Operation& operation, OperationGuard& guard);

  // Closes the lane and lets go of the segment; nothing may run any more.
  void Release();

 private:
  Status AllReduce(const Operation& operation, OperationGuard& guard);
  Status ReduceScatter(const Operation& operation, OperationGuard& guard);
  Status AllGather(const Operation& operation, OperationGuard& guard);
  Status Broadcast(const Operation& operation, OperationGuard& guard);
  Status Barrier(OperationGuard& guard);

  Status AllReduceChunk(std::byte* data, size_t count, const ReduceKernels& kernels,
                        OperationGuard& guard);
  Status AllReduceOnLane(Ring& lane, const Piece& part, std::byte* accumulators,
                         const ReduceKernels& kernels, OperationGuard& guard);
  Status ReduceScatterInside(const Operation& operation, OperationGuard& guard);
  Status ReduceScatterChunk(const Operation& operation, const Part& range,
                            const ReduceKernels& kernels, OperationGuard& guard);
  Status ReduceScatterOnLane(Ring& lane, size_t block_elements, std::vector<std::byte>& reduced,
                             const ReduceKernels& kernels, OperationGuard& guard);
  // Each lane's owner has its part of data; afterwards all ranks of this host have all of it.
  Status GatherLanes(std::byte* data, size_t bytes, size_t unit, OperationGuard& guard);

  bool spans_hosts() const { return topology_.num_hosts() > 1; }
  size_t num_lanes() const { return static_cast<size_t>(topology_.num_lanes()); }

  const Topology topology_;
  ShmGroup inside_;
  std::optional<Ring> lane_;
  std::vector<std::byte> accumulators_;
};

}  // namespace sparkdl

#endif  // SPARKDL_COLLECTIVES_H_
