// The first failure of a communicator, kept for all later operations.
#ifndef SPARKDL_FAILURE_LATCH_H_
#define SPARKDL_FAILURE_LATCH_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>

#include "sparkdl/status.h"

namespace sparkdl {

// Thread-safe. Keeps the first status that is set; status() returns it from then on.
class FailureLatch {
 public:
  bool is_set() const { return word_.load(std::memory_order_acquire) != 0; }

  // Ok if nothing has failed.
  Status status() const;

  // Returns true if this is the first failure.
  bool Set(const Status& status);

  // Sleeps until a failure is set, at most for the given time.
  void WaitFor(std::chrono::milliseconds longest) const;

 private:
  std::atomic<uint32_t> word_{0};
  mutable std::mutex mutex_;
  Status status_;
};

}  // namespace sparkdl

#endif  // SPARKDL_FAILURE_LATCH_H_
