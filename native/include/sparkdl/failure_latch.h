// The first failure of a communicator, kept for all later operations.
#ifndef SPARKDL_FAILURE_LATCH_H_
#define SPARKDL_FAILURE_LATCH_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>

#include "sparkdl/status.h"

namespace sparkdl {

// Thread-safe. The first status stays; whoever comes later is told it.
class FailureLatch {
 public:
  bool is_set() const { return word_.load(std::memory_order_acquire) != 0; }

  // Ok while nothing failed.
  Status status() const;

  // Returns true if this is the first failure.
  bool Set(const Status& status);

  // Sleeps until a failure is set, for at most this long.
  void WaitFor(std::chrono::milliseconds longest) const;

 private:
  std::atomic<uint32_t> word_{0};
  mutable std::mutex mutex_;
  Status status_;
};

}  // namespace sparkdl

#endif  // SPARKDL_FAILURE_LATCH_H_
