#include "sparkdl/operation_guard.h"

#include <poll.h>

#include <algorithm>
#include <cstdio>

namespace sparkdl {
namespace {

// Nothing else wakes a sleeper when news comes: a slice bounds how late it learns of it. The
// progress thread has the lifelines to pass on, hop by hop, so its slices are shorter.
constexpr std::chrono::milliseconds kSlice{50};
constexpr std::chrono::milliseconds kProgressThreadSlice{20};
constexpr std::chrono::milliseconds kInterruptInterval{100};
constexpr std::chrono::milliseconds kNewsGrace{500};

std::string Seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", seconds);
  return text;
}

}  // namespace

Status OperationGuard::Told() const {
  if (failure_.is_set()) return failure_.status();
  const auto leaver = lifeline_.leaver();
  if (leaver.has_value() && leaver->next_sequence <= signature_.sequence) {
    return Status(StatusCode::kFailed, "rank " + std::to_string(leaver->rank) +
                                           " closed the communicator before it took part in " +
                                           Describe(signature_));
  }
  return {};
}

Status OperationGuard::Check() {
  if (runner_.is_progress_thread) lifeline_.Service();
  if (Status told = Told(); !told.ok()) return told;
  if (runner_.interrupt_check != nullptr) {
    const auto now = Clock::now();
    if (signal_noted_ || now >= next_interrupt_check_) {
      signal_noted_ = false;
      next_interrupt_check_ = now + kInterruptInterval;
      if (runner_.interrupt_check()) {
        return Status(StatusCode::kInterrupted, "a signal interrupted " + Describe(signature_));
      }
    }
  }
  return {};
}

std::chrono::milliseconds OperationGuard::Slice() {
  return std::min(deadline_.Left(), runner_.is_progress_thread ? kProgressThreadSlice : kSlice);
}

std::array<int, 2> OperationGuard::WatchFds() {
  if (!runner_.is_progress_thread) return {-1, -1};
  return lifeline_.PollFds();
}

Status OperationGuard::TimedOut(const std::string& who) const {
  return Status(StatusCode::kTimeout,
                Describe(signature_) + " waited " + Seconds(deadline_.timeout_s()) + ": " + who);
}

Status OperationGuard::TimedOutUnlessTold(const std::string& who) { return NewsOr(TimedOut(who)); }

Status OperationGuard::NewsOr(const Status& otherwise) {
  const auto end = Clock::now() + kNewsGrace;
  for (;;) {
    if (Status told = Told(); !told.ok()) return told;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
    if (left.count() <= 0) return otherwise;
    if (runner_.is_progress_thread) {
      const auto fds = lifeline_.PollFds();
      pollfd polled[2] = {{fds[0], POLLIN, 0}, {fds[1], POLLIN, 0}};
      ::poll(polled, 2, static_cast<int>(std::min(left, kProgressThreadSlice).count()));
      lifeline_.Service();
    } else {
      failure_.WaitFor(std::min(left, kProgressThreadSlice));
    }
  }
}

std::string NameRanks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace sparkdl
