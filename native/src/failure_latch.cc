#include "sparkdl/failure_latch.h"

#include "sparkdl/futex.h"

namespace sparkdl {

Status FailureLatch::status() const {
  if (!is_set()) return {};
  const std::scoped_lock lock(mutex_);
  return status_;
}

bool FailureLatch::Set(const Status& status) {
  const std::scoped_lock lock(mutex_);
  if (is_set()) return false;
  status_ = status;
  word_.store(1, std::memory_order_release);
  FutexWakeAll(word_);
  return true;
}

void FailureLatch::WaitFor(std::chrono::milliseconds longest) const {
  if (!is_set()) FutexWait(word_, 0, longest);
}

}  // namespace sparkdl
