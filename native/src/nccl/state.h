// State of an NCCL communicator, its operations in progress, and the thread that watches them.
#ifndef SPARKDL_NCCL_STATE_H_
#define SPARKDL_NCCL_STATE_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "nccl/gpu.h"
#include "sparkdl/deadline.h"
#include "sparkdl/nccl/operation.h"
#include "sparkdl/status.h"

namespace sparkdl {

// Operations that were put on a stream as one group and have not been seen to be complete.
struct NcclFlight {
  uint64_t number = 0;
  CudaEvent event = nullptr;
  // The first operation of the group, and the number of the others.
  NcclOperation operation;
  size_t num_more = 0;
  double timeout_s = 0;
  Clock::time_point deadline;
};

// Such as "allreduce of 4 float32 and 2 more".
std::string Describe(const NcclFlight& flight);

// Shared by the communicator and its watching thread, which outlives the communicator if
// ncclCommAbort hangs. All fields are guarded by the mutex, which is held during calls of NCCL,
// because these do not block.
struct NcclState {
  NcclState(std::shared_ptr<const Gpu> its_gpu, std::string its_name)
      : gpu(std::move(its_gpu)), name(std::move(its_name)) {}
  ~NcclState();
  NcclState(const NcclState&) = delete;
  NcclState& operator=(const NcclState&) = delete;

  // Keeps the first failure, after which the watching thread aborts.
  void Fail(const Status& status);

  // Whether no call of NCCL is still in progress. Fails if NCCL reports an error.
  Result<bool> IsQuiet();

  // Removes the flights that are complete. Fails if one missed its deadline or the GPU reports an
  // error.
  void LookAtFlights();

  Result<CudaEvent> TakeEvent();

  const std::shared_ptr<const Gpu> gpu;
  const std::string name;

  std::mutex mutex;
  std::condition_variable changed;
  // While the communicator is being opened, NCCL keeps the address of this field and writes to it.
  NcclComm comm = nullptr;
  Status failure;
  // ended: the communicator was destroyed or aborted. left: it was destroyed after an orderly end,
  // and its failure only says that it is closed.
  bool ended = false;
  bool left = false;
  std::deque<NcclFlight> flights;
  std::vector<CudaEvent> spare_events;
  // Recorded on the stream that a group follows; made for the first such group.
  CudaEvent fork = nullptr;
  uint64_t last_number = 0;
  // Communicator from which this one is being split off, and the one that is being split off from
  // this one.
  std::shared_ptr<NcclState> parent;
  std::shared_ptr<NcclState> child;
};

// Body of the watching thread: sleeps while nothing is in progress, otherwise checks the flights,
// and calls ncclCommAbort after a failure.
void WatchNccl(const std::shared_ptr<NcclState>& state);

}  // namespace sparkdl

#endif  // SPARKDL_NCCL_STATE_H_
