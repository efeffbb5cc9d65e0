// An NCCL communicator: one GPU per rank, operations on the caller's streams.
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

// Returns true if a signal is to interrupt the calling thread.
using InterruptCheck = bool (*)();

struct NcclOptions {
  int rank = 0;
  int world_size = 1;
  std::string name;
  // Timeout in seconds of Close(), and of BeginSplit() with these options.
  double timeout_s = 300.0;
};

// All methods may be called from any thread. Run() does not wait for data: operations are carried
// out on their stream. NCCL runs in non-blocking mode, so that waiting for a missing peer can be
// given up.
class NcclCommunicator {
 public:
  // Begins to open a communicator on a GPU. All ranks call it with the id that one of them has
  // created.
  static Result<std::unique_ptr<NcclCommunicator>> Begin(
      const std::shared_ptr<const NcclLibrary>& library, int gpu, const NcclUniqueId& id,
      const NcclOptions& options);

  // Aborts the communicator if it is not closed.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int rank() const { return options_.rank; }
  int world_size() const { return options_.world_size; }

  // Waits until opening or splitting is complete; false if it is not complete within timeout_s.
  Result<bool> WaitReady(double timeout_s, InterruptCheck interrupt_check);

  // Begins to split off a communicator of the ranks with the same color, ordered by their keys. All
  // ranks must call it. Ranks without a color (kNcclNoColor) get null, and must then wait until
  // this communicator is ready again. options: rank, world size and name in the new communicator.
  Result<std::unique_ptr<NcclCommunicator>> BeginSplit(int color, int key,
                                                       const NcclOptions& options,
                                                       InterruptCheck interrupt_check);

  // Puts operations on a stream as one group and returns the number of the group. If they are not
  // complete within timeout_s, the communicator fails. after: a stream whose work so far the
  // operations follow, in addition to that of their own stream.
  Result<uint64_t> Run(const std::vector<NcclOperation>& operations, CudaStream stream,
                       std::optional<CudaStream> after, double timeout_s,
                       InterruptCheck interrupt_check);

  // Makes later work on a stream follow the group with this number; does not wait.
  Status Join(uint64_t number, CudaStream stream);

  // Whether the group with this number, and all before it, are complete on the GPU.
  Result<bool> IsDone(uint64_t number);

  // Waits until IsDone(number). kTimeout if that takes longer than timeout_s; the operations then
  // continue.
  Status Wait(uint64_t number, double timeout_s, InterruptCheck interrupt_check);

  // Whether any operation is known to be in progress.
  bool busy() const;

  // Aborts the operations in progress on this rank and makes later calls fail. The watching thread
  // aborts at once, but possibly after this method has returned. The peers are not notified.
  void Abort(const Status& reason);

  // Waits for the operations in progress, then leaves. Repeated calls do nothing.
  Status Close(InterruptCheck interrupt_check);

  // Reason why the communicator failed; empty if it has not failed, or was closed before.
  std::optional<std::string> failure() const;

 private:
  NcclCommunicator(std::shared_ptr<NcclState> state, NcclOptions options);

  Status Validate(const NcclOperation& operation) const;
  // made: receives the reductions that were created, to be destroyed once NCCL is quiet.
  Status Issue(const std::vector<NcclOperation>& operations, CudaStream stream,
               std::vector<int>& made);
  Status IssueOne(const NcclOperation& operation, int reduction, CudaStream stream);
  Result<bool> AwaitQuiet(NcclState& state, Deadline& deadline, InterruptCheck interrupt_check);
  // Makes later work on one stream follow the work that is on another one.
  Status Follow(CudaStream stream, CudaStream after);
  Result<uint64_t> Register(const std::vector<NcclOperation>& operations, CudaStream stream,
                            double timeout_s);
  Status Finish(Deadline& deadline, InterruptCheck interrupt_check);
  void EndWatch(std::chrono::milliseconds longest);

  const NcclOptions options_;
  const std::shared_ptr<NcclState> state_;
  // Held while a group of operations is being started: groups start one after another.
  std::mutex order_;
  bool closed_ = false;
  const uint64_t fork_generation_;
  std::unique_ptr<std::thread> watch_;
};

}  // namespace sparkdl

#endif  // SPARKDL_NCCL_COMMUNICATOR_H_
