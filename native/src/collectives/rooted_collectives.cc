// Collectives' gather and scatter.
#include "sparkdl/collectives/collectives.h"
#include "sparkdl/copy.h"

namespace sparkdl {

// Parts of all blocks on this rank's lane, by host: in `whole` on the root, and in `staged` where
// they wait on the way. Elsewhere they only pass through and have only a size.
std::vector<Pieces> Collectives::PartsOnLane(const Operation& operation, std::byte* whole,
                                             std::vector<std::byte>& staged) const {
  std::vector<Pieces> parts(static_cast<size_t>(topology_.num_hosts()));
  if (!lane_.has_value()) return parts;
  const Blocks blocks = BlocksOf(operation);
  const int root_host = topology_.host_of(operation.root);
  const bool is_root = topology_.rank() == operation.root;
  const auto waits_here = [&](int host) {
    if (is_root) return false;
    return topology_.host() == root_host ? host != root_host : host == topology_.host();
  };
  size_t staged_bytes = 0;
  for (int host = 0; host < topology_.num_hosts(); ++host) {
    for (const int rank : topology_.ranks_on(host)) {
      const Part part =
          PartOf(blocks.bytes(rank), num_lanes(), static_cast<size_t>(topology_.local_rank()));
      parts[host].push_back(
          {is_root ? whole + blocks.begin(rank) + part.begin : nullptr, part.size});
      if (waits_here(host)) staged_bytes += part.size;
    }
  }
  staged.resize(staged_bytes);
  std::byte* next = staged.data();
  for (int host = 0; host < topology_.num_hosts(); ++host) {
    if (!waits_here(host)) continue;
    for (Piece& piece : parts[host]) {
      piece.data = next;
      next += piece.bytes;
    }
  }
  return parts;
}

// On the root's host, the ranks publish their blocks for the root. On every other host, each lane's
// owner collects its part of the host's blocks and sends it along the lane; the owner on the root's
// host publishes what arrives.
Status Collectives::Gather(const Operation& operation, OperationGuard& guard) {
  const Blocks blocks = BlocksOf(operation);
  const int root_host = topology_.host_of(operation.root);
  const bool is_root = topology_.rank() == operation.root;
  const bool is_root_host = topology_.host() == root_host;
  const auto my_lane = static_cast<size_t>(topology_.local_rank());
  const auto part_of = [&](size_t lane, int rank) {
    return PartOf(blocks.bytes(rank), num_lanes(), lane);
  };
  const auto at_root = [&](int rank, const Part& part) {
    return Piece{is_root ? operation.output + blocks.begin(rank) + part.begin : nullptr, part.size};
  };
  std::vector<std::byte> staged;
  const std::vector<Pieces> on_lane = PartsOnLane(operation, operation.output, staged);
  std::vector<Pieces> destinations;
  size_t position = 0;
  for (const int rank : topology_.local_ranks()) {
    const size_t bytes = blocks.bytes(rank);
    if (is_root_host) {
      destinations.push_back({at_root(rank, {0, bytes})});
      continue;
    }
    Pieces stream;
    const Part part = lane_.has_value() ? part_of(my_lane, rank) : Part{0, 0};
    stream.push_back({nullptr, part.begin});
    if (lane_.has_value()) stream.push_back(on_lane[topology_.host()][position]);
    stream.push_back({nullptr, bytes - part.begin - part.size});
    destinations.push_back(std::move(stream));
    ++position;
  }
  const size_t own_bytes = blocks.bytes(topology_.rank());
  SPARKDL_RETURN_IF_ERROR(inside_.Gather({{operation.input, own_bytes}}, destinations, guard));
  SPARKDL_RETURN_IF_ERROR(inside_.board().SyncIfNotYet(guard));
  if (is_root) CopyBytes(at_root(topology_.rank(), {}).data, operation.input, own_bytes);
  if (!spans_hosts()) return {};

  if (lane_.has_value()) {
    if (!is_root_host) {
      const Part part = part_of(my_lane, topology_.rank());
      CopyBytes(on_lane[topology_.host()][my_lane].data, operation.input + part.begin, part.size);
    }
    SPARKDL_RETURN_IF_ERROR(lane_->Gather(on_lane, root_host, guard));
  }
  if (!is_root_host) return {};
  ConstPieces mine;
  std::vector<Pieces> arrived(static_cast<size_t>(inside_.size()));
  for (int host = 0; host < topology_.num_hosts(); ++host) {
    if (host == root_host) continue;
    for (size_t lane = 0; lane < num_lanes(); ++lane) {
      for (const int rank : topology_.ranks_on(host)) {
        arrived[lane].push_back(at_root(rank, part_of(lane, rank)));
      }
    }
    if (lane_.has_value()) Append(mine, on_lane[host]);
  }
  return inside_.Gather(mine, arrived, guard);
}

// The root publishes all blocks on its host. Each lane's owner takes its part of the blocks for
// other hosts and sends it along the lane; the owners on those hosts publish it again.
Status Collectives::Scatter(const Operation& operation, OperationGuard& guard) {
  const Blocks blocks = BlocksOf(operation);
  const int root_host = topology_.host_of(operation.root);
  const bool is_root = topology_.rank() == operation.root;
  const bool is_root_host = topology_.host() == root_host;
  const auto my_lane = static_cast<size_t>(topology_.local_rank());
  const auto part_of = [&](size_t lane, int rank) {
    return PartOf(blocks.bytes(rank), num_lanes(), lane);
  };
  std::vector<std::byte> staged;
  // Sending does not write to the input.
  const std::vector<Pieces> on_lane =
      PartsOnLane(operation, const_cast<std::byte*>(operation.input), staged);
  if (is_root_host) {
    Pieces stream;
    for (int rank = 0; rank < topology_.world_size(); ++rank) {
      const size_t bytes = blocks.bytes(rank);
      if (rank == topology_.rank()) {
        stream.push_back({operation.output, bytes});
      } else if (lane_.has_value() && topology_.host_of(rank) != root_host) {
        const Part part = part_of(my_lane, rank);
        const auto position = static_cast<size_t>(topology_.local_rank_of(rank));
        stream.push_back({nullptr, part.begin});
        stream.push_back(on_lane[topology_.host_of(rank)][position]);
        stream.push_back({nullptr, bytes - part.begin - part.size});
      } else {
        stream.push_back({nullptr, bytes});
      }
    }
    std::vector<Pieces> destinations(static_cast<size_t>(inside_.size()));
    destinations[topology_.local_rank_of(operation.root)] = stream;
    ConstPieces mine;
    if (is_root) mine = {{operation.input, blocks.total()}};
    SPARKDL_RETURN_IF_ERROR(inside_.Gather(mine, destinations, guard));
    SPARKDL_RETURN_IF_ERROR(inside_.board().SyncIfNotYet(guard));
    if (is_root) {
      CopyBytes(operation.output, operation.input + blocks.begin(topology_.rank()),
                blocks.bytes(topology_.rank()));
    }
  }
  if (!spans_hosts()) return {};

  if (lane_.has_value()) SPARKDL_RETURN_IF_ERROR(lane_->Scatter(on_lane, root_host, guard));
  if (is_root_host) return {};
  std::vector<Pieces> arrived(static_cast<size_t>(inside_.size()));
  for (size_t lane = 0; lane < num_lanes(); ++lane) {
    for (const int rank : topology_.local_ranks()) {
      const Part part = part_of(lane, rank);
      const bool is_mine = rank == topology_.rank();
      arrived[lane].push_back({is_mine ? operation.output + part.begin : nullptr, part.size});
    }
  }
  ConstPieces mine;
  if (lane_.has_value()) {
    Append(mine, on_lane[topology_.host()]);
    const Part part = part_of(my_lane, topology_.rank());
    CopyBytes(operation.output + part.begin, on_lane[topology_.host()][my_lane].data, part.size);
  }
  return inside_.Gather(mine, arrived, guard);
}

}  // namespace sparkdl
