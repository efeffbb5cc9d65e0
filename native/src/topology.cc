#include "sparkdl/topology.h"

#include <algorithm>
#include <string>

namespace sparkdl {

Result<Topology> Topology::Make(int rank, const std::vector<int>& host_of_rank) {
  const int world_size = static_cast<int>(host_of_rank.size());
  if (rank < 0 || rank >= world_size) {
    return Status(StatusCode::kInvalidArgument, "rank " + std::to_string(rank) +
                                                    " is outside a world of " +
                                                    std::to_string(world_size) + " ranks");
  }
  Topology topology;
  topology.rank_ = rank;
  topology.world_size_ = world_size;
  topology.host_of_rank_ = host_of_rank;
  for (int other = 0; other < world_size; ++other) {
    const int host = host_of_rank[other];
    const int num_hosts = topology.num_hosts();
    if (host < 0 || host > num_hosts) {
      return Status(StatusCode::kInvalidArgument,
                    "host_of_rank must number hosts by first appearance; rank " +
                        std::to_string(other) + " is on host " + std::to_string(host) + " after " +
                        std::to_string(num_hosts) + " hosts");
    }
    if (host == num_hosts) topology.ranks_on_host_.emplace_back();
    topology.local_rank_of_.push_back(static_cast<int>(topology.ranks_on_host_[host].size()));
    topology.ranks_on_host_[host].push_back(other);
  }
  topology.host_ = host_of_rank[rank];
  topology.local_rank_ = topology.local_rank_of_[rank];
  topology.num_lanes_ = world_size;
  for (const auto& ranks : topology.ranks_on_host_) {
    topology.num_lanes_ = std::min(topology.num_lanes_, static_cast<int>(ranks.size()));
  }
  return topology;
}

int Topology::next_on_lane() const {
  return ranks_on_host_[(host_ + 1) % num_hosts()][local_rank_];
}

int Topology::previous_on_lane() const {
  return ranks_on_host_[(host_ + num_hosts() - 1) % num_hosts()][local_rank_];
}

}  // namespace sparkdl
