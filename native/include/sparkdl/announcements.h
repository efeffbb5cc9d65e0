// Wakes the threads that wait for queued operations, after several operations at a time.
#ifndef SPARKDL_ANNOUNCEMENTS_H_
#define SPARKDL_ANNOUNCEMENTS_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "sparkdl/operation_times.h"
#include "sparkdl/pending_operation.h"

namespace sparkdl {

// If the threads that wait for many small operations were woken after each of them, a woken thread
// would take the core from a rank that still works on the next operation, for which all other ranks
// then wait. While more small operations follow, waiters are therefore woken at intervals that
// double. This delays a waiter by at most kShortestNs or the time for which the queue has been
// busy, whichever is longer, and never by more than kLongestNs. All waiters are woken before an
// operation that may take long.
//
// Used by the progress thread only.
class Announcements {
 public:
  // Wakes all waiters if the next operation, of this many bytes, may take long, or if the interval
  // has passed.
  void BeforeOperation(uint64_t bytes) {
    if (done_.empty()) return;
    if (bytes > kSmallBytes) {
      WakeAll();
    } else if (NowNs() - since_ns_ > interval_ns_) {
      WakeNow();
      interval_ns_ = std::min(2 * interval_ns_, kLongestNs);
    }
  }

  // The operation must already be done().
  void Add(std::shared_ptr<PendingOperation> pending) {
    if (done_.empty()) since_ns_ = NowNs();
    done_.push_back(std::move(pending));
  }

  // Wakes all waiters and resets the interval. Must also be called when the queue becomes empty.
  void WakeAll() {
    WakeNow();
    interval_ns_ = kShortestNs;
  }

 private:
  static constexpr uint64_t kSmallBytes = uint64_t{1} << 20;
  static constexpr int64_t kShortestNs = 200'000;
  static constexpr int64_t kLongestNs = 1'600'000;

  void WakeNow() {
    for (const auto& pending : done_) pending->WakeWaiters();
    done_.clear();
  }

  std::vector<std::shared_ptr<PendingOperation>> done_;
  int64_t since_ns_ = 0;
  int64_t interval_ns_ = kShortestNs;
};

}  // namespace sparkdl

#endif  // SPARKDL_ANNOUNCEMENTS_H_
