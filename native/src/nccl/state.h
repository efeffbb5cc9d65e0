// An NCCL communicator, what is under way on it, and the thread that watches it.
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

// What was put on a stream and has not been seen to be complete.
struct NcclFlight {
  uint64_t number = 0;
  CudaEvent event = nullptr;
  std::string what;
  double timeout_s = 0;
  Clock::time_point deadline;
};

// Shared by the communicator and its watching thread, which outlives it where ncclCommAbort hangs.
// All of it is guarded by the mutex, which is held across calls of NCCL, as these do not block.
struct NcclState {
  NcclState(std::shared_ptr<const Gpu> its_gpu, std::string its_name)
      : gpu(std::move(its_gpu)), name(std::move(its_name)) {}
  ~NcclState();
  NcclState(const NcclState&) = delete;
  NcclState& operator=(const NcclState&) = delete;

  // Keeps the first failure; the watching thread then aborts.
  void Fail(const Status& status);

  // Whether nothing that was called is still in progress. Fails if NCCL has an error.
  Result<bool> IsQuiet();

  // Lets go of what is complete. Fails if something was not in time or the GPU has an error.
  void LookAtFlights();

  Result<CudaEvent> TakeEvent();

  const std::shared_ptr<const Gpu> gpu;
  const std::string name;

  std::mutex mutex;
  std::condition_variable changed;
  // While opening, NCCL keeps the address of this field and writes to it.
  NcclComm comm = nullptr;
  Status failure;
  // The communicator was destroyed or aborted; in the first case it also left in peace, and its
  // failure only tells that.
  bool ended = false;
  bool left = false;
  std::deque<NcclFlight> flights;
  std::vector<CudaEvent> spare_events;
  uint64_t last_number = 0;
  // Of whom this one is being split off, and who is being split off of this one.
  std::shared_ptr<NcclState> parent;
  std::shared_ptr<NcclState> child;
};

// What the watching thread does: sleeps while nothing is under way, looks at what is, and calls
// ncclCommAbort after a failure.
void WatchNccl(const std::shared_ptr<NcclState>& state);

}  // namespace sparkdl

#endif  // SPARKDL_NCCL_STATE_H_
