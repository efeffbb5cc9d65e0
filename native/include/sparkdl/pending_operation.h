// An operation that was submitted, and its outcome.
#ifndef SPARKDL_PENDING_OPERATION_H_
#define SPARKDL_PENDING_OPERATION_H_

#include <atomic>
#include <chrono>
#include <cstdint>

#include "sparkdl/futex.h"
#include "sparkdl/operation.h"
#include "sparkdl/status.h"

namespace sparkdl {

// Shared by the submitter and the thread that runs it. Once done() is true nobody touches the
// buffers any more, whatever the outcome.
class PendingOperation {
 public:
  PendingOperation(const Operation& operation, double timeout_s)
      : operation_(operation), timeout_s_(timeout_s) {}

  const Operation& operation() const { return operation_; }
  double timeout_s() const { return timeout_s_; }

  bool done() const { return done_.load(std::memory_order_acquire) != 0; }

  // Only once done().
  const Status& status() const { return status_; }

  // Sleeps until done, for at most this long.
  void WaitFor(std::chrono::milliseconds longest) const {
    if (!done()) FutexWait(done_, 0, longest);
  }

  void Finish(Status status) {
    status_ = std::move(status);
    done_.store(1, std::memory_order_release);
    FutexWakeAll(done_);
  }

 private:
  const Operation operation_;
  const double timeout_s_;
  Status status_;
  std::atomic<uint32_t> done_{0};
};

}  // namespace sparkdl

#endif  // SPARKDL_PENDING_OPERATION_H_
