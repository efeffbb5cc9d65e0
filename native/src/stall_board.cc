#include "sparkdl/stall_board.h"

#include <unistd.h>

#include <cstdint>
#include <utility>

namespace sparkdl {

void StallBoard::Post(StallNotice notice) {
  {
    const std::scoped_lock lock(mutex_);
    notice_ = std::move(notice);
  }
  const uint64_t one = 1;
  // Fails only on overflow, and then the reader is about to wake anyway.
  if (options_.notice_fd >= 0) {
    static_cast<void>(!::write(options_.notice_fd, &one, sizeof(one)));
  }
}

std::optional<StallNotice> StallBoard::Take() {
  const std::scoped_lock lock(mutex_);
  return std::exchange(notice_, std::nullopt);
}

void StallBoard::BeginWait(Wait wait) {
  const std::scoped_lock lock(mutex_);
  wait_ = std::move(wait);
  has_wait_.store(true, std::memory_order_relaxed);
}

void StallBoard::EndWait() {
  if (!has_wait()) return;
  const std::scoped_lock lock(mutex_);
  wait_.reset();
  has_wait_.store(false, std::memory_order_relaxed);
}

std::optional<Wait> StallBoard::wait() const {
  const std::scoped_lock lock(mutex_);
  return wait_;
}

}  // namespace sparkdl
