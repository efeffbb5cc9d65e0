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
#include "sparkdl/failure_latch.h"
#include "sparkdl/operation.h"
#include "sparkdl/operation_guard.h"
#include "sparkdl/operation_monitor.h"
#include "sparkdl/operation_times.h"
#include "sparkdl/pending_operation.h"
#include "sparkdl/ring/agreed_collectives.h"
#include "sparkdl/shm/arena.h"
#include "sparkdl/shm/segment.h"
#include "sparkdl/status.h"
#include "sparkdl/tcp/fork_guard.h"
#include "sparkdl/tcp/lifeline.h"
#include "sparkdl/topology.h"
#include "sparkdl/unique_fd.h"

namespace sparkdl {

// What a communicator is made of. -1 stands for a socket or segment that this rank does not have.
struct CommunicatorOptions {
  int rank = 0;
  std::vector<int> host_of_rank;
  int segment_fd = -1;
  int lane_to_next_fd = -1;
  int lane_from_previous_fd = -1;
  int lifeline_to_next_fd = -1;
  int lifeline_from_previous_fd = -1;
  double timeout_s = 300.0;
  // How sums and averages of float32 travel between hosts: kFloat32, kBfloat16 or kFloat16, the
  // same on all ranks. They are added up in float32 in any case.
  Dtype wire = Dtype::kFloat32;
  StallOptions stalls;
  // Instead of segment_fd, for ranks that are threads of one process.
  std::shared_ptr<Segment> segment;
};

// All methods may be called by any thread. Operations of one thread run in the order of its calls,
// which must be the same on every rank.
class Communicator {
 public:
  // Takes the descriptors over, whatever the outcome.
  static Result<std::unique_ptr<Communicator>> Open(const CommunicatorOptions& options);

  // Closes without waiting for queued operations.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return topology_.rank(); }
  int world_size() const { return topology_.world_size(); }
  double timeout_s() const { return timeout_s_; }

  // Maps an arena, which the ranks of this host open in the same order; fd: its memory, of
  // Arena::PartBytesFor(...) bytes for each of them, stays the caller's.
  Result<std::shared_ptr<const Arena>> AddArena(int fd, size_t part_bytes);

  // Tells an operation in place that its arrays lie in an arena, if they do.
  void Locate(Operation& operation) const;

  // Ok if this rank can take part in the operation; says what is wrong otherwise.
  Status Validate(const Operation& operation) const;

  // Runs a validated operation and returns when its buffers are free again: on the calling thread
  // if nothing is queued.
  Status Run(const Operation& operation, double timeout_s, InterruptCheck interrupt_check);

  // Takes part with zeros in what the other ranks do, until all have called this; `last` is then
  // the rank that did so last.
  Status Join(double timeout_s, InterruptCheck interrupt_check, int& last);

  // Queues a validated operation for the progress thread.
  std::shared_ptr<PendingOperation> Submit(const Operation& operation, double timeout_s);

  // Waits for a submitted operation; kTimeout if it is not done by then, but it continues.
  static Status Wait(const PendingOperation& pending, double timeout_s,
                     InterruptCheck interrupt_check);

  // Makes every operation here and on all peers fail with the reason. Returns at once.
  void Abort(const std::string& reason);

  // Waits for what is queued, at most the default timeout, then says goodbye. Again: does nothing.
  Status Close(InterruptCheck interrupt_check);

  // Tells of the operations, also after the communicator is gone.
  const std::shared_ptr<OperationMonitor>& monitor() const { return monitor_; }

  // Why the communicator failed; empty while it has not.
  std::optional<std::string> failure() const;

 private:
  Communicator(Topology topology, const CommunicatorOptions& options,
               std::shared_ptr<Segment> segment);

  // Not ok in a process that was forked from the one that opened the communicator.
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
  uint64_t next_sequence_ = 0;  // belongs to whoever has the turn

  std::atomic<bool> has_arenas_{false};
  mutable std::mutex arenas_mutex_;
  std::vector<std::weak_ptr<const Arena>> arenas_;  // guarded by arenas_mutex_

  // Held by the thread that runs an operation.
  std::atomic<bool> turn_is_taken_{false};
  // Operations submitted and not done.
  std::atomic<uint32_t> num_pending_{0};
  std::mutex queue_mutex_;
  std::deque<std::shared_ptr<PendingOperation>> queue_;  // guarded by queue_mutex_

  std::mutex close_mutex_;
  std::atomic<bool> is_closing_{false};
  bool is_closed_ = false;  // guarded by close_mutex_
  std::atomic<bool> stops_{false};
  UniqueFd wake_fd_;
  std::atomic<bool> progress_sleeps_{false};
  Announcements announcements_;  // the progress thread's
  std::thread progress_thread_;
};

}  // namespace sparkdl

#endif  // SPARKDL_COMMUNICATOR_H_
