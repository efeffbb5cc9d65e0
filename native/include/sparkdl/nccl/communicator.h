// A communicator of NCCL: one GPU per rank, operations on the caller's streams.
#ifndef SPARKDL_NCCL_COMMUNICATOR_H_
#define SPARKDL_NCCL_COMMUNICATOR_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "sparkdl/deadline.h"
#include "sparkdl/nccl/library.h"
#include "sparkdl/nccl/operation.h"
#include "sparkdl/status.h"

namespace sparkdl {

struct NcclState;

// True if a signal wants the calling thread back.
using InterruptCheck = bool (*)();

struct NcclOptions {
  int rank = 0;
  int world_size = 1;
  std::string name;
  // Of closing, in seconds.
  double timeout_s = 300.0;
};

// All methods may be called by any thread. Nothing here waits for data: what an operation does, it
// does on its stream. NCCL is asked not to block, so that a peer that is missing can be given up.
class NcclCommunicator {
 public:
  // Begins to open a communicator on a GPU; all ranks do so with the id that one of them made.
  static Result<std::unique_ptr<NcclCommunicator>> Begin(
      const std::shared_ptr<const NcclLibrary>& library, int gpu, const NcclUniqueId& id,
      const NcclOptions& options);

  // Aborts if it is not closed.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int rank() const { return options_.rank; }
  int world_size() const { return options_.world_size; }

  // Waits for the end of opening; false if there is more to wait for.
  Result<bool> WaitReady(double timeout_s, InterruptCheck interrupt_check);

  // Begins to split off the communicator of the ranks with this color, in the order of their keys.
  // All ranks make the call; those without a color (kNcclNoColor) get null and wait for this one to
  // be ready again. options has rank, size and name in the new one.
  Result<std::unique_ptr<NcclCommunicator>> BeginSplit(int color, int key,
                                                       const NcclOptions& options,
                                                       InterruptCheck interrupt_check);

  // Puts operations on a stream as one group and returns their common number. They are to be
  // complete within timeout_s, or the communicator fails.
  Result<uint64_t> Run(const std::vector<NcclOperation>& operations, CudaStream stream,
                       double timeout_s, InterruptCheck interrupt_check);

  // Whether what has this number, and all before it, is complete on the GPU.
  Result<bool> IsDone(uint64_t number);

  // Waits until it is; kTimeout if it is not by then, but it continues.
  Status Wait(uint64_t number, double timeout_s, InterruptCheck interrupt_check);

  // Whether anything is known to be under way.
  bool busy() const;

  // Ends what is under way here, at once but not before it returns, and refuses what follows. The
  // peers do not hear of it.
  void Abort(const Status& reason);

  // Waits for what is under way, then leaves. Again: does nothing.
  Status Close(InterruptCheck interrupt_check);

  // Why it failed; nothing if it did not, or was closed before.
  std::optional<std::string> failure() const;

 private:
  NcclCommunicator(std::shared_ptr<NcclState> state, NcclOptions options);

  Status Validate(const NcclOperation& operation) const;
  // made takes the reductions that were made for it, to be destroyed once NCCL is quiet.
  Status Issue(const std::vector<NcclOperation>& operations, CudaStream stream,
               std::vector<int>& made);
  Status IssueOne(const NcclOperation& operation, int reduction, CudaStream stream);
  Result<bool> AwaitQuiet(NcclState& state, Deadline& deadline, InterruptCheck interrupt_check);
  Result<uint64_t> Register(const std::vector<NcclOperation>& operations, CudaStream stream,
                            double timeout_s);
  Status Finish(Deadline& deadline, InterruptCheck interrupt_check);
  void EndWatch(std::chrono::milliseconds longest);

  const NcclOptions options_;
  const std::shared_ptr<NcclState> state_;
  // Held while an operation is being started: they start one after another.
  std::mutex order_;
  bool closed_ = false;
  const uint64_t fork_generation_;
  std::unique_ptr<std::thread> watch_;
};

}  // namespace sparkdl

#endif  // SPARKDL_NCCL_COMMUNICATOR_H_
