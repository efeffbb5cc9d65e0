// Operations with their buffers, and the expected content of the buffers afterwards.
#ifndef SPARKDL_TESTS_TRIAL_H_
#define SPARKDL_TESTS_TRIAL_H_

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "reference.h"
#include "requests.h"
#include "sparkdl/communicator.h"

namespace sparkdl::tests {

// One operation of one rank. Not copyable, because the operation points into memory that only a
// move takes along.
struct Trial {
  Trial() = default;
  Trial(Trial&&) = default;
  Trial& operator=(Trial&&) = default;

  Operation operation;
  Bytes input;  // empty for an in-place operation
  Bytes output;
  Bytes input_afterwards;
  Bytes output_afterwards;

  // Reports a failure unless the operation succeeded and the buffers have the expected content.
  void Check(const Status& status) const;
};

enum class Place : uint8_t {
  kApart,
  kInside,  // the block of this rank lies in the buffer of all blocks
};

// Creates this rank's part of operations whose results the reference knows. counts: as in
// Operation; if empty, all blocks have `count` elements.
class Trials {
 public:
  explicit Trials(const Communicator& communicator)
      : rank_(communicator.rank()), world_size_(communicator.world_size()) {}

  struct Numbers {
    Dtype dtype = Dtype::kFloat32;
    ReduceOp op = ReduceOp::kSum;
    Scales scales = {};
  };

  Trial AllReduce(const Numbers& numbers, size_t count) const;
  // For separate arrays with these numbers of elements.
  Trial AllReduceGroup(const Numbers& numbers, const std::vector<size_t>& counts) const;
  Trial Reduce(const Numbers& numbers, size_t count, int root) const;
  Trial ReduceScatter(const Numbers& numbers, size_t count, const Counts& counts = {},
                      Place place = Place::kApart) const;
  Trial AllGather(Dtype dtype, size_t count, const Counts& counts = {},
                  Place place = Place::kApart) const;
  // For separate arrays, each with blocks of these numbers of elements.
  Trial ReduceScatterGroup(const Numbers& numbers, const std::vector<Counts>& counts) const;
  Trial AllGatherGroup(Dtype dtype, const std::vector<Counts>& counts) const;
  Trial Gather(Dtype dtype, size_t count, int root, const Counts& counts = {}) const;
  Trial Scatter(Dtype dtype, size_t count, int root, const Counts& counts = {}) const;
  Trial Broadcast(Dtype dtype, size_t count, int root) const;
  Trial AllToAll(Dtype dtype, size_t count) const;
  // count_between: number of elements that rank `from` sends to rank `to`.
  Trial AllToAll(Dtype dtype, const std::function<size_t(int from, int to)>& count_between) const;

 private:
  Operation GroupOf(Operation operation, const std::vector<Counts>& counts) const;
  Bytes AllBlocks(Dtype dtype, size_t count, const Counts& counts) const;
  Trial AllToAllOf(Dtype dtype, const std::function<size_t(int, int)>& count_between) const;

  const int rank_;
  const int world_size_;
};

// Runs the function on all ranks of a world of every topology.
void OnEveryTopology(const std::function<void(Communicator&, const Trials&)>& function);

// Runs the trial and checks it.
void RunTrial(Communicator& communicator, const Trial& trial);

}  // namespace sparkdl::tests

#endif  // SPARKDL_TESTS_TRIAL_H_
