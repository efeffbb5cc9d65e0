#include "world.h"

#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <thread>
#include <utility>

#include "check.h"

namespace sparkdl::tests {

World::World(std::vector<int> host_of_rank, double timeout_s, Mapping mapping)
    : host_of_rank_(std::move(host_of_rank)),
      options_(host_of_rank_.size()),
      has_descriptors_(host_of_rank_.size(), true),
      communicators_(host_of_rank_.size()) {
  const int num_hosts = *std::ranges::max_element(host_of_rank_) + 1;
  std::vector<std::vector<int>> ranks_on(num_hosts);
  std::vector<int> everyone;
  size_t num_lanes = host_of_rank_.size();
  for (int rank = 0; rank < size(); ++rank) {
    ranks_on[host_of_rank_[rank]].push_back(rank);
    everyone.push_back(rank);
    options_[rank].rank = rank;
    options_[rank].host_of_rank = host_of_rank_;
    options_[rank].timeout_s = timeout_s;
  }
  for (const auto& ranks : ranks_on) {
    num_lanes = std::min(num_lanes, ranks.size());
    if (ranks.size() == 1) continue;
    const int local_size = static_cast<int>(ranks.size());
    const UniqueFd fd(::memfd_create("segment", MFD_CLOEXEC));
    CHECK_EQ(::ftruncate(fd.get(), static_cast<off_t>(Segment::BytesFor(local_size))), 0);
    auto shared = Segment::Attach(fd.get(), local_size);
    CHECK_OK(shared.status());
    for (const int rank : ranks) {
      if (mapping == Mapping::kShared) {
        options_[rank].segment = shared.value();
      } else {
        options_[rank].segment_fd = ::dup(fd.get());
      }
    }
  }
  Connect(everyone, &CommunicatorOptions::lifeline_to_next_fd,
          &CommunicatorOptions::lifeline_from_previous_fd);
  for (size_t lane = 0; lane < num_lanes && num_hosts > 1; ++lane) {
    std::vector<int> ranks;
    for (const auto& local : ranks_on) ranks.push_back(local[lane]);
    Connect(ranks, &CommunicatorOptions::lane_to_next_fd,
            &CommunicatorOptions::lane_from_previous_fd);
  }
}

World::World(std::vector<int> host_of_rank, double timeout_s, const StallOptions& stalls)
    : World(std::move(host_of_rank), timeout_s) {
  for (CommunicatorOptions& options : options_) options.stalls = stalls;
}

World::~World() {
  // A communicator does not wait for its peers when it is destroyed, so they can be destroyed one
  // after another.
  communicators_.clear();
  for (int rank = 0; rank < size(); ++rank) Kill(rank);
}

void World::Connect(const std::vector<int>& ranks, int CommunicatorOptions::* to_next,
                    int CommunicatorOptions::* from_previous) {
  if (ranks.size() == 1) return;
  for (size_t i = 0; i < ranks.size(); ++i) {
    int pair[2];
    CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    options_[ranks[i]].*to_next = pair[0];
    options_[ranks[(i + 1) % ranks.size()]].*from_previous = pair[1];
  }
}

Communicator& World::Open(int rank) {
  auto opened = Communicator::Open(options_[rank]);
  CHECK_OK(opened.status());
  if (!opened.ok()) std::abort();
  communicators_[rank] = std::move(opened).value();
  has_descriptors_[rank] = false;
  return *communicators_[rank];
}

void World::OpenAll() {
  for (int rank = 0; rank < size(); ++rank) {
    if (communicators_[rank] == nullptr && has_descriptors_[rank]) Open(rank);
  }
}

void World::Kill(int rank) {
  if (!has_descriptors_[rank]) return;
  has_descriptors_[rank] = false;
  const CommunicatorOptions& options = options_[rank];
  for (const int fd : {options.segment_fd, options.lane_to_next_fd, options.lane_from_previous_fd,
                       options.lifeline_to_next_fd, options.lifeline_from_previous_fd}) {
    UniqueFd(fd).Reset();
  }
}

void World::Run(const std::function<void(Communicator&, int)>& function) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size(); ++rank) {
    if (communicators_[rank] == nullptr) continue;
    threads.emplace_back([&, rank] { function(at(rank), rank); });
  }
  for (std::thread& thread : threads) thread.join();
}

std::vector<std::vector<int>> Topologies() {
  return {{0},          {0, 0},       {0, 0, 0, 0}, {0, 1},          {0, 1, 2},
          {0, 0, 1, 1}, {0, 0, 0, 1}, {0, 1, 0, 1}, {0, 1, 1, 0, 1}, {0, 1, 1, 2, 0, 1}};
}

}  // namespace sparkdl::tests
