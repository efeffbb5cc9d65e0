// Waking those who wait for queued operations, some operations at a time.
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

// Who waits for many small operations one after another would be woken after each of them, and each
// time take the core from a rank that is still busy with the next, for which all others then wait.
// So while there are more of them, those who wait are woken at intervals that double: waking seldom
// adds to a wait at most kShortestNs or as long as the queue has been busy, and never more than
// kLongestNs. Before anything that may last all are woken.
//
// Belongs to the progress thread.
class Announcements {
 public:
  // Wakes all if what comes next may last, or enough time has passed.
  void BeforeOperation(uint64_t bytes) {
    if (done_.empty()) return;
    if (bytes > kSmallBytes) {
      WakeAll();
    } else if (NowNs() - since_ns_ > interval_ns_) {
      WakeNow();
      interval_ns_ = std::min(2 * interval_ns_, kLongestNs);
    }
  }

  // The operation is done() already.
  void Add(std::shared_ptr<PendingOperation> pending) {
    if (done_.empty()) since_ns_ = NowNs();
    done_.push_back(std::move(pending));
  }

  // To be called as well when nothing more is queued, as intervals then begin anew.
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
