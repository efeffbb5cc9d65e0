#include "sparkdl/collectives.h"

#include <algorithm>
#include <utility>

#include "sparkdl/copy.h"

namespace sparkdl {

Collectives::Collectives(Topology topology, std::shared_ptr<Segment> segment,
                         std::optional<Ring> ring)
    : topology_(std::move(topology)),
      inside_(std::move(segment), topology_.local_rank(), topology_.local_ranks()),
      lane_(std::move(ring)) {}

Status Collectives::Run(const Operation& operation, OperationGuard& guard) {
  inside_.board().Begin(guard.signature());
  if (spans_hosts()) {
    // The ranks of this host first: a mismatch among them is found before another host is told.
    SPARKDL_RETURN_IF_ERROR(inside_.board().SyncIfNotYet(guard));
    if (lane_.has_value()) SPARKDL_RETURN_IF_ERROR(lane_->Begin(guard));
  }
  Status status;
  switch (operation.kind) {
    case OpKind::kAllReduce:
      status = AllReduce(operation, guard);
      break;
    case OpKind::kReduceScatter:
      status = ReduceScatter(operation, guard);
      break;
    case OpKind::kAllGather:
      status = AllGather(operation, guard);
      break;
    case OpKind::kBroadcast:
      status = Broadcast(operation, guard);
      break;
    case OpKind::kBarrier:
      status = Barrier(guard);
      break;
  }
  SPARKDL_RETURN_IF_ERROR(status);
  return inside_.board().SyncIfNotYet(guard);
}

void Collectives::Release() {
  lane_.reset();
  inside_.Release();
}

Status Collectives::GatherLanes(std::byte* data, size_t bytes, size_t unit, OperationGuard& guard) {
  ConstPieces mine;
  std::vector<Pieces> destinations(static_cast<size_t>(inside_.size()));
  for (size_t lane = 0; lane < num_lanes(); ++lane) {
    const Part part = PartOf(bytes, num_lanes(), lane, unit);
    destinations[lane] = {{data + part.begin, part.size}};
    if (static_cast<int>(lane) == topology_.local_rank()) {
      mine = {{data + part.begin, part.size}};
    }
  }
  return inside_.Gather(mine, destinations, guard);
}

Status Collectives::AllGather(const Operation& operation, OperationGuard& guard) {
  const size_t bytes = operation.bytes();
  const auto block = [&](int rank) { return operation.output + static_cast<size_t>(rank) * bytes; };
  CopyBytes(block(topology_.rank()), operation.input, bytes);

  std::vector<Pieces> inside_blocks;
  for (const int rank : topology_.local_ranks()) inside_blocks.push_back({{block(rank), bytes}});
  SPARKDL_RETURN_IF_ERROR(inside_.Gather({{operation.input, bytes}}, inside_blocks, guard));
  if (!spans_hosts()) return {};

  // Lane i carries part i of every rank's block.
  const auto lane_stream = [&](size_t lane, int host) {
    const Part part = PartOf(bytes, num_lanes(), lane);
    Pieces stream;
    for (const int rank : topology_.ranks_on(host)) {
      stream.push_back({block(rank) + part.begin, part.size});
    }
    return stream;
  };
  if (lane_.has_value()) {
    std::vector<Pieces> blocks;
    for (int host = 0; host < topology_.num_hosts(); ++host) {
      blocks.push_back(lane_stream(static_cast<size_t>(topology_.local_rank()), host));
    }
    SPARKDL_RETURN_IF_ERROR(lane_->AllGather(blocks, guard));
  }
  ConstPieces mine;
  std::vector<Pieces> destinations(static_cast<size_t>(inside_.size()));
  for (size_t lane = 0; lane < num_lanes(); ++lane) {
    for (int host = 0; host < topology_.num_hosts(); ++host) {
      if (host == topology_.host()) continue;
      for (const Piece& piece : lane_stream(lane, host)) {
        destinations[lane].push_back(piece);
        if (static_cast<int>(lane) == topology_.local_rank()) {
          mine.push_back({piece.data, piece.bytes});
        }
      }
    }
  }
  return inside_.Gather(mine, destinations, guard);
}

Status Collectives::Broadcast(const Operation& operation, OperationGuard& guard) {
  const size_t bytes = operation.bytes();
  const int root_host = topology_.host_of(operation.root);
  if (topology_.host() == root_host) {
    const int local_root = topology_.local_rank_of(operation.root);
    std::vector<Pieces> destinations(static_cast<size_t>(inside_.size()));
    destinations[local_root] = {{operation.output, bytes}};
    ConstPieces mine;
    if (topology_.local_rank() == local_root) mine = {{operation.output, bytes}};
    SPARKDL_RETURN_IF_ERROR(inside_.Gather(mine, destinations, guard));
  }
  if (!spans_hosts()) return {};
  if (lane_.has_value()) {
    const Part part = PartOf(bytes, num_lanes(), static_cast<size_t>(topology_.local_rank()));
    SPARKDL_RETURN_IF_ERROR(
        lane_->Broadcast({operation.output + part.begin, part.size}, root_host, guard));
  }
  if (topology_.host() == root_host) return {};
  return GatherLanes(operation.output, bytes, 1, guard);
}

Status Collectives::Barrier(OperationGuard& guard) {
  SPARKDL_RETURN_IF_ERROR(inside_.board().SyncIfNotYet(guard));
  if (!spans_hosts()) return {};
  if (lane_.has_value()) SPARKDL_RETURN_IF_ERROR(lane_->Barrier(guard));
  return inside_.board().Sync(guard);
}

}  // namespace sparkdl
