// Placement of the ranks: which share a host, and which own a lane between hosts.
#ifndef SPARKDL_TOPOLOGY_H_
#define SPARKDL_TOPOLOGY_H_

#include <vector>

#include "sparkdl/status.h"

namespace sparkdl {

// One rank's view of the world. num_lanes is the smallest number of ranks on a host. Lane i is a
// ring over all hosts through the ranks with local_rank i, and carries 1 / num_lanes of the data.
class Topology {
 public:
  // host_of_rank: host index of every rank; hosts are numbered by first appearance.
  static Result<Topology> Make(int rank, const std::vector<int>& host_of_rank);

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  int num_hosts() const { return static_cast<int>(ranks_on_host_.size()); }
  int host() const { return host_; }
  int local_rank() const { return local_rank_; }
  int local_size() const { return static_cast<int>(local_ranks().size()); }
  int num_lanes() const { return num_lanes_; }
  bool owns_lane() const { return num_hosts() > 1 && local_rank_ < num_lanes_; }

  // Ranks on this host, or on any host, ascending.
  const std::vector<int>& local_ranks() const { return ranks_on_host_[host_]; }
  const std::vector<int>& ranks_on(int host) const { return ranks_on_host_[host]; }

  int host_of(int rank) const { return host_of_rank_[rank]; }
  // The local_rank of a rank on its own host.
  int local_rank_of(int rank) const { return local_rank_of_[rank]; }
  // Rank on the next or previous host on this rank's lane.
  int next_on_lane() const;
  int previous_on_lane() const;
  // Neighbours on the lifeline ring over all ranks.
  int next_rank() const { return (rank_ + 1) % world_size_; }
  int previous_rank() const { return (rank_ + world_size_ - 1) % world_size_; }

 private:
  Topology() = default;

  int rank_ = 0;
  int world_size_ = 1;
  int host_ = 0;
  int local_rank_ = 0;
  int num_lanes_ = 1;
  std::vector<int> host_of_rank_;
  std::vector<int> local_rank_of_;
  std::vector<std::vector<int>> ranks_on_host_;
};

}  // namespace sparkdl

#endif  // SPARKDL_TOPOLOGY_H_
