// Waking those who wait for queued operations, some operations at a time.
#ifndef SPARKDL_ANNOUNCEMENTS_H_
#define SPARKDL_ANNOUNCEMENTS_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "sparkdl/operation_times.h"
#include "sparkdl/pending_operation.h"

namespace sparkdl {

// Who waits for many small operations one after another would be woken after each of them, and each
// time take the core from a rank that is still busy with the next. So while there are more of them,
// those who wait are woken every kLongestNs; and before anything that may last.
//
// Belongs to the progress thread.
class Announcements {
 public:
  // Wakes all if what comes next may last, or enough time has passed.
  void BeforeOperation(uint64_t bytes) {
    if (done_.empty()) return;
    if (bytes > kSmallBytes || NowNs() - since_ns_ > kLongestNs) WakeAll();
  }

  // The operation is done() already.
  void Add(std::shared_ptr<PendingOperation> pending) {
    if (done_.empty()) since_ns_ = NowNs();
    done_.push_back(std::move(pending));
  }

  void WakeAll() {
    for (const auto& pending : done_) pending->WakeWaiters();
    done_.clear();
  }

 private:
  static constexpr uint64_t kSmallBytes = uint64_t{1} << 20;
  static constexpr int64_t kLongestNs = 200'000;

  std::vector<std::shared_ptr<PendingOperation>> done_;
  int64_t since_ns_ = 0;
};

}  // namespace sparkdl

#endif  // SPARKDL_ANNOUNCEMENTS_H_
