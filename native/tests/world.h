// A world of ranks that are threads of this process, connected like real ranks.
#ifndef SPARKDL_TESTS_WORLD_H_
#define SPARKDL_TESTS_WORLD_H_

#include <functional>
#include <memory>
#include <vector>

#include "sparkdl/communicator.h"

namespace sparkdl::tests {

enum class Mapping : uint8_t {
  // One mapping for all ranks of a host: ThreadSanitizer, which works by address, sees their
  // accesses to one another's slots.
  kShared,
  // One mapping per rank at its own address, as between processes.
  kOwn,
};

class World {
 public:
  explicit World(std::vector<int> host_of_rank, double timeout_s = 30.0,
                 Mapping mapping = Mapping::kShared);
  World(std::vector<int> host_of_rank, double timeout_s, const StallOptions& stalls);
  ~World();

  int size() const { return static_cast<int>(host_of_rank_.size()); }

  // Opens the communicator of one rank, or of all that are not open yet.
  Communicator& Open(int rank);
  void OpenAll();
  Communicator& at(int rank) { return *communicators_[rank]; }

  // Simulates the death of a rank that never opened: closes its descriptors without a goodbye.
  void Kill(int rank);

  // The descriptors of a rank that never opened.
  const CommunicatorOptions& options(int rank) const { return options_[rank]; }

  // Runs function(communicator, rank) on one thread per open rank and joins them.
  void Run(const std::function<void(Communicator&, int)>& function);

 private:
  void Connect(const std::vector<int>& ranks, int CommunicatorOptions::* to_next,
               int CommunicatorOptions::* from_previous);

  std::vector<int> host_of_rank_;
  std::vector<CommunicatorOptions> options_;
  std::vector<bool> has_descriptors_;
  std::vector<std::unique_ptr<Communicator>> communicators_;
};

// Topologies on which every collective must work.
std::vector<std::vector<int>> Topologies();

}  // namespace sparkdl::tests

#endif  // SPARKDL_TESTS_WORLD_H_
