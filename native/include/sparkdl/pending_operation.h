// A submitted operation and its outcome.
#ifndef SPARKDL_PENDING_OPERATION_H_
#define SPARKDL_PENDING_OPERATION_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>

#include "sparkdl/futex.h"
#include "sparkdl/operation.h"
#include "sparkdl/operation_monitor.h"
#include "sparkdl/operation_times.h"
#include "sparkdl/status.h"

namespace sparkdl {

// Shared by the submitter and the thread that runs the operation. Once done() is true, the buffers
// are no longer accessed, whatever the outcome. After a failure, arrays in an arena are an
// exception: a peer that has not learned of the failure yet may still write to them.
class PendingOperation {
 public:
  PendingOperation(Operation operation, double timeout_s, std::shared_ptr<OperationMonitor> monitor)
      : operation_(std::move(operation)), timeout_s_(timeout_s), monitor_(std::move(monitor)) {}

  const Operation& operation() const { return operation_; }
  double timeout_s() const { return timeout_s_; }
  int64_t queued_ns() const { return queued_ns_; }
  OperationMonitor& monitor() const { return *monitor_; }

  bool done() const { return done_.load(std::memory_order_acquire) != 0; }

  // Valid only once done().
  const Status& status() const { return status_; }

  // Sleeps until done(), at most for the given time.
  void WaitFor(std::chrono::milliseconds longest) const {
    // In one total order with Complete and WakeWaiters: either this thread sees that the operation
    // is done, or they see the waiter.
    num_waiters_.fetch_add(1, std::memory_order_seq_cst);
    if (done_.load(std::memory_order_seq_cst) == 0) FutexWait(done_, 0, longest);
    num_waiters_.fetch_sub(1, std::memory_order_seq_cst);
  }

  // Makes done() true. WakeWaiters() wakes the threads that sleep.
  void Complete(Status status) {
    status_ = std::move(status);
    done_.store(1, std::memory_order_seq_cst);
  }

  void WakeWaiters() {
    if (num_waiters_.load(std::memory_order_seq_cst) != 0) FutexWakeAll(done_);
  }

  void Finish(Status status) {
    Complete(std::move(status));
    WakeWaiters();
  }

 private:
  const Operation operation_;
  const double timeout_s_;
  const std::shared_ptr<OperationMonitor> monitor_;
  const int64_t queued_ns_ = NowNs();
  Status status_;
  std::atomic<uint32_t> done_{0};
  mutable std::atomic<uint32_t> num_waiters_{0};
};

}  // namespace sparkdl

#endif  // SPARKDL_PENDING_OPERATION_H_
