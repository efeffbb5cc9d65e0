// Time in which any of the caller's threads has been blocked.
#ifndef SPARKDL_BLOCKED_CLOCK_H_
#define SPARKDL_BLOCKED_CLOCK_H_

#include <cstdint>
#include <mutex>

#include "sparkdl/operation_times.h"

namespace sparkdl {

// Runs while at least one thread is inside a BlockedSection. Thread-safe.
class BlockedClock {
 public:
  // Reading in nanoseconds at time `now` of the steady clock, which must not lie before the latest
  // change.
  int64_t At(int64_t now) const {
    const std::scoped_lock lock(mutex_);
    return num_blocked_ > 0 && now > since_ ? total_ + now - since_ : total_;
  }

 private:
  friend class BlockedSection;

  void Enter() {
    const std::scoped_lock lock(mutex_);
    if (num_blocked_++ == 0) since_ = NowNs();
  }
  void Leave() {
    const std::scoped_lock lock(mutex_);
    if (--num_blocked_ == 0) total_ += NowNs() - since_;
  }

  mutable std::mutex mutex_;
  int num_blocked_ = 0;
  int64_t since_ = 0;
  int64_t total_ = 0;
};

class BlockedSection {
 public:
  explicit BlockedSection(BlockedClock& clock) : clock_(clock) { clock_.Enter(); }
  ~BlockedSection() { clock_.Leave(); }
  BlockedSection(const BlockedSection&) = delete;
  BlockedSection& operator=(const BlockedSection&) = delete;

 private:
  BlockedClock& clock_;
};

}  // namespace sparkdl

#endif  // SPARKDL_BLOCKED_CLOCK_H_
