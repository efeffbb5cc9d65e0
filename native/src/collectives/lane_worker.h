// A thread that moves data between hosts while another thread moves data within this host.
#ifndef SPARKDL_RING_LANE_WORKER_H_
#define SPARKDL_RING_LANE_WORKER_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "sparkdl/operation_guard.h"
#include "sparkdl/status.h"

namespace sparkdl {

// Lives as long as one operation, on the stack of the thread that runs it. Does the work that this
// thread submits, in order, until something fails.
class LaneWorker {
 public:
  using Work = std::function<Status(OperationGuard&)>;

  // guard: the operation's guard, which only the operation's own thread continues to use.
  explicit LaneWorker(OperationGuard& guard);

  // Drops the work that has not begun, and makes the current work fail.
  ~LaneWorker();
  LaneWorker(const LaneWorker&) = delete;
  LaneWorker& operator=(const LaneWorker&) = delete;

  void Submit(Work work);

  // Waits until num_done pieces of work are done; returns the status of the first that failed.
  Status Await(size_t num_done);

 private:
  void Loop();
  Status Do(const Work& work);

  OperationGuard& guard_;
  std::atomic<bool> stops_{false};
  OperationGuard own_guard_;

  std::mutex mutex_;  // guards the members up to status_
  std::condition_variable change_;
  std::deque<Work> queue_;
  size_t num_done_ = 0;
  Status status_;

  std::thread thread_;  // last, because it uses all the others
};

}  // namespace sparkdl

#endif  // SPARKDL_RING_LANE_WORKER_H_
