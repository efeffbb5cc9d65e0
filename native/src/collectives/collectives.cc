#include "sparkdl/collectives/collectives.h"

#include <algorithm>
#include <utility>

#include "sparkdl/copy.h"

namespace sparkdl {

Collectives::Collectives(Topology topology, std::shared_ptr<Segment> segment,
                         std::optional<Ring> ring, Dtype wire)
    : topology_(std::move(topology)),
      inside_(std::move(segment), topology_.local_rank(), topology_.local_ranks()),
      lane_(std::move(ring)),
      wire_(WireFormat::Find(wire)) {}

Status Collectives::Perform(const Operation& operation, OperationGuard& guard) {
  Operation scaled;
  const Operation* todo = &operation;
  if (operation.prescale != 1.0) {
    SPARKDL_RETURN_IF_ERROR(Prescale(operation, scaled, guard));
    todo = &scaled;
  }
  switch (operation.kind) {
    case OpKind::kAllReduce:
      return AllReduce(*todo, guard);
    case OpKind::kReduceScatter:
      return ReduceScatter(*todo, guard);
    case OpKind::kAllGather:
      return AllGather(operation, guard);
    case OpKind::kBroadcast:
      return Broadcast(operation, guard);
    case OpKind::kBarrier:
      return Barrier(guard);
    case OpKind::kReduce:
      return Reduce(*todo, guard);
    case OpKind::kGather:
      return Gather(operation, guard);
    case OpKind::kScatter:
      return Scatter(operation, guard);
    case OpKind::kAllToAll:
      return AllToAll(operation, guard);
    case OpKind::kJoin:
      return Status(StatusCode::kFailed, "join moves no data");
  }
  return {};
}

void Collectives::Release() {
  scaled_ = {};
  lane_.reset();
  inside_.Release();
}

std::byte* Collectives::Accumulators(size_t bytes, size_t which) {
  std::vector<std::byte>& memory = accumulators_[which];
  if (memory.size() < bytes) memory.resize(bytes);
  return memory.data();
}

Status Collectives::GatherLanes(const Pieces& data, size_t unit, OperationGuard& guard) {
  const size_t bytes = TotalBytes(data);
  ConstPieces mine;
  std::vector<Pieces> destinations(static_cast<size_t>(inside_.size()));
  for (size_t lane = 0; lane < num_lanes(); ++lane) {
    const Part part = PartOf(bytes, num_lanes(), lane, unit);
    destinations[lane] = Slice(data, part.begin, part.size);
    if (owns_lane(lane)) Append(mine, destinations[lane]);
  }
  return inside_.Gather(mine, destinations, guard);
}

Status Collectives::AllGather(const Operation& operation, OperationGuard& guard) {
  const std::vector<Pieces> blocks = StreamsOf(operation, operation.output, operation.group);
  const Pieces& own = blocks[static_cast<size_t>(topology_.rank())];
  const ConstPieces input = operation.group.empty() ? ConstPieces{{operation.input, own[0].bytes}}
                                                    : operation.group_input;
  std::vector<Pieces> inside_blocks;
  for (const int rank : topology_.local_ranks()) {
    inside_blocks.push_back(blocks[static_cast<size_t>(rank)]);
  }
  SPARKDL_RETURN_IF_ERROR(inside_.Gather(input, inside_blocks, guard));
  // Only now is it certain that the ranks agree.
  SPARKDL_RETURN_IF_ERROR(inside_.board().SyncIfNotYet(guard));
  for (size_t i = 0; i < own.size(); ++i) CopyBytes(own[i].data, input[i].data, own[i].bytes);
  if (!spans_hosts()) return {};

  // Lane i carries part i of every rank's block.
  const auto lane_stream = [&](size_t lane, int host) {
    Pieces stream;
    for (const int rank : topology_.ranks_on(host)) {
      const Pieces& whole = blocks[static_cast<size_t>(rank)];
      const Part part = PartOf(TotalBytes(whole), num_lanes(), lane);
      Append(stream, Slice(whole, part.begin, part.size));
    }
    return stream;
  };
  if (lane_.has_value()) {
    std::vector<Pieces> host_blocks;
    for (int host = 0; host < topology_.num_hosts(); ++host) {
      host_blocks.push_back(lane_stream(static_cast<size_t>(topology_.local_rank()), host));
    }
    SPARKDL_RETURN_IF_ERROR(lane_->AllGather(host_blocks, guard));
  }
  ConstPieces mine;
  std::vector<Pieces> destinations(static_cast<size_t>(inside_.size()));
  for (size_t lane = 0; lane < num_lanes(); ++lane) {
    for (int host = 0; host < topology_.num_hosts(); ++host) {
      if (host == topology_.host()) continue;
      const Pieces stream = lane_stream(lane, host);
      Append(destinations[lane], stream);
      if (owns_lane(lane)) Append(mine, stream);
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
  return GatherLanes({{operation.output, bytes}}, 1, guard);
}

Status Collectives::Barrier(OperationGuard& guard) {
  // With several hosts, the agreement has already waited for all ranks.
  return inside_.board().SyncIfNotYet(guard);
}

}  // namespace sparkdl
