// The open group of ranks: validates, orders and runs operations.
#ifndef SPARKDL_COMMUNICATOR_H_
#define SPARKDL_COMMUNICATOR_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "sparkdl/announcements.h"
#include "sparkdl/collectives/agreed_collectives.h"
#include "sparkdl/failure_latch.h"
#include "sparkdl/operation.h"
#include "sparkdl/operation_guard.h"
#include "sparkdl/operation_monitor.h"
#include "sparkdl/operation_times.h"
#include "sparkdl/pending_operation.h"
#include "sparkdl/shm/arena.h"
#include "sparkdl/shm/segment.h"
#include "sparkdl/status.h"
#include "sparkdl/tcp/fork_guard.h"
#include "sparkdl/tcp/lifeline.h"
#include "sparkdl/topology.h"
#include "sparkdl/unique_fd.h"

namespace sparkdl {

// The parts from which a communicator is opened. -1 stands for a socket or segment that this rank
// does not have.
struct CommunicatorOptions {
  int rank = 0;
  std::vector<int> host_of_rank;
  int segment_fd = -1;
  int lane_to_next_fd = -1;
  int lane_from_previous_fd = -1;
  int lifeline_to_next_fd = -1;
  int lifeline_from_previous_fd = -1;
  double timeout_s = 300.0;
  // Format in which sums and averages of float32 travel between hosts: kFloat32, kBfloat16 or
  // kFloat16, the same on all ranks. They are always accumulated in float32.
  Dtype wire = Dtype::kFloat32;
  StallOptions stalls;
  // Used instead of segment_fd if the ranks are threads of one process.
  std::shared_ptr<Segment> segment;
};

// All methods may be called from any thread. Operations called from one thread run in the order of
// the calls, which must be the same on every rank.
class Communicator {
 public:
  // Takes ownership of the descriptors, even if it fails.
  static Result<std::unique_ptr<Communicator>> Open(const CommunicatorOptions& options);

  // Closes without waiting for queued operations.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return topology_.rank(); }
  int world_size() const { return topology_.world_size(); }
  double timeout_s() const { return timeout_s_; }

  // Maps an arena. All ranks of this host must open their arenas in the same order. fd: memory with
  // Arena::PartBytesFor(...) bytes for each of these ranks; the caller keeps the descriptor.
  Result<std::shared_ptr<const Arena>> AddArena(int fd, size_t part_bytes);

  // Sets operation.arena if all arrays of an allreduce lie in one arena.
  void Locate(Operation& operation) const;

  // Ok if this rank can take part in the operation; otherwise the status says what is wrong.
  Status Validate(const Operation& operation) const;

  // Runs a validated operation, on the calling thread if nothing is queued. When it returns, the
  // caller may use the buffers again.
  Status Run(const Operation& operation, double timeout_s, InterruptCheck interrupt_check);

  // Takes part in the operations of the other ranks with zeros, until all ranks have called Join.
  // Sets `last` to the rank that called it last.
  Status Join(double timeout_s, InterruptCheck interrupt_check, int& last);

  // Queues a validated operation for the progress thread.
  std::shared_ptr<PendingOperation> Submit(const Operation& operation, double timeout_s);

  // Waits for a submitted operation. kTimeout if it is not done within timeout_s; the operation
  // then continues.
  static Status Wait(const PendingOperation& pending, double timeout_s,
                     InterruptCheck interrupt_check);

  // Makes every operation on this rank and on all peers fail with the reason. Returns at once.
  void Abort(const std::string& reason);

  // Waits for queued operations, at most timeout_s(), then says goodbye to the peers. Repeated
  // calls do nothing.
  Status Close(InterruptCheck interrupt_check);

  // Measurements of the operations; available also after the communicator is destroyed.
  const std::shared_ptr<OperationMonitor>& monitor() const { return monitor_; }

  // Reason why the communicator failed; empty if it has not failed.
  std::optional<std::string> failure() const;

 private:
  Communicator(Topology topology, const CommunicatorOptions& options,
               std::shared_ptr<Segment> segment);

  // Fails in a process that was forked from the one that opened the communicator.
  Status CheckProcess() const;
  void ProgressLoop();
  bool RunNextQueued();
  void SleepUntilNews();
  void WakeProgressThread();
  Status Execute(const Operation& operation, double timeout_s, Runner runner,
                 OperationTimes& times);
  Status Fail(const Status& status);
  bool TryAcquireTurn();
  void ReleaseTurn();
  Status DrainQueue(InterruptCheck interrupt_check);
  void Shutdown();

  const Topology topology_;
  const double timeout_s_;
  const uint64_t fork_generation_ = ForkGeneration();
  const std::shared_ptr<OperationMonitor> monitor_;
  FailureLatch failure_;
  Lifeline lifeline_;
  AgreedCollectives collectives_;
  uint64_t next_sequence_ = 0;  // used only by the thread that has the turn

  std::atomic<bool> has_arenas_{false};
  mutable std::mutex arenas_mutex_;
  std::vector<std::weak_ptr<const Arena>> arenas_;  // guarded by arenas_mutex_

  // True while a thread has the turn, that is, runs an operation.
  std::atomic<bool> turn_is_taken_{false};
  // Number of operations that were submitted and are not done.
  std::atomic<uint32_t> num_pending_{0};
  std::mutex queue_mutex_;
  std::deque<std::shared_ptr<PendingOperation>> queue_;  // guarded by queue_mutex_

  std::mutex close_mutex_;
  std::atomic<bool> is_closing_{false};
  bool is_closed_ = false;  // guarded by close_mutex_
  std::atomic<bool> stops_{false};
  UniqueFd wake_fd_;
  std::atomic<bool> progress_sleeps_{false};
  Announcements announcements_;  // used only by the progress thread
  std::thread progress_thread_;
};

}  // namespace sparkdl

#endif  // SPARKDL_COMMUNICATOR_H_
