#include "sparkdl/operation_guard.h"

#include <poll.h>

#include <algorithm>
#include <cstdio>

#include "sparkdl/announcements.h"

namespace sparkdl {
namespace {

// Messages do not wake a sleeping thread, so the length of a slice bounds how late it learns of
// them. The progress thread has to pass messages on from hop to hop, so its slices are shorter.
constexpr std::chrono::milliseconds kSlice{50};
constexpr std::chrono::milliseconds kProgressThreadSlice{20};
constexpr std::chrono::milliseconds kInterruptInterval{100};
constexpr std::chrono::milliseconds kNewsGrace{500};
// Answers take a hop or two per rank; the rest is for overloaded machines.
constexpr std::chrono::milliseconds kAnswerGrace{1000};
constexpr std::chrono::milliseconds kAnswerInterval{2};
// Shorter waits are not reported.
constexpr std::chrono::milliseconds kWaitWorthTelling{200};

std::string Seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", seconds);
  return text;
}

}  // namespace

OperationGuard OperationGuard::ForHelper(const std::atomic<bool>& stops) {
  static_cast<void>(deadline_.Left());  // starts the time of both now, if it has not started
  OperationGuard helper = *this;
  helper.runner_ = {};
  helper.stops_ = &stops;
  return helper;
}

Status OperationGuard::Told() const {
  if (failure_.is_set()) return failure_.status();
  if (is_stopped()) return Status(StatusCode::kFailed, Summary() + " was given up");
  const auto leaver = lifeline_.leaver();
  if (leaver.has_value() && leaver->next_sequence <= signature_.sequence) {
    return Status(StatusCode::kFailed, "rank " + std::to_string(leaver->rank) +
                                           " closed the communicator before it took part in " +
                                           Summary());
  }
  return {};
}

Status OperationGuard::Check() {
  if (runner_.is_progress_thread) lifeline_.Service();
  if (runner_.announcements != nullptr) runner_.announcements->WakeAll();
  if (Status told = Told(); !told.ok()) return told;
  if (runner_.interrupt_check != nullptr) {
    const auto now = Clock::now();
    if (signal_noted_ || now >= next_interrupt_check_) {
      signal_noted_ = false;
      next_interrupt_check_ = now + kInterruptInterval;
      if (runner_.interrupt_check()) {
        return Status(StatusCode::kInterrupted, "a signal interrupted " + Summary());
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

Status OperationGuard::TimedOut() { return Missed("waited " + Seconds(deadline_.timeout_s())); }

Status OperationGuard::Missed(const std::string& how) {
  const uint32_t call = lifeline_.CallRoll();
  const auto end = Clock::now() + kAnswerGrace;
  for (;;) {
    if (Status told = Told(); !told.ok()) return told;
    const Attendance attendance = lifeline_.AttendanceOf(signature_.sequence, call);
    if (attendance.silent.empty() || Clock::now() >= end) {
      return Status(StatusCode::kTimeout, Summary() + " " + how + ": " + attendance.ToString());
    }
    WaitForNews(kAnswerInterval);
  }
}

Status OperationGuard::HeedStall() {
  const StallOptions& options = stalls_.options();
  const auto now = Clock::now();
  if (has_progressed_) {
    has_progressed_ = false;
    stalls_.EndWait();
    stall_call_.reset();
    waits_since_ = now;
    next_warning_ = Deadline::After(now, options.warn_after_s);
    return {};
  }
  if (now - waits_since_ >= kWaitWorthTelling && !stalls_.has_wait()) {
    stalls_.BeginWait(
        {.operation = Summary(), .since = waits_since_, .timeout_s = deadline_.timeout_s()});
  }
  if (!options.is_on()) return {};
  if (now >= Deadline::After(waits_since_, options.abort_after_s)) {
    return Missed("stalled for " + Seconds(options.abort_after_s));
  }
  if (stall_call_.has_value()) {
    const Attendance attendance = lifeline_.AttendanceOf(signature_.sequence, *stall_call_);
    if (attendance.silent.empty() || now >= answers_until_) PostStall(attendance, now);
  } else if (now >= next_warning_) {
    next_warning_ = Deadline::After(now, options.warn_after_s);
    answers_until_ = now + kAnswerGrace;
    stall_call_ = lifeline_.CallRoll();
  }
  return {};
}

void OperationGuard::PostStall(const Attendance& attendance, Clock::time_point now) {
  stall_call_.reset();
  const std::chrono::duration<double> waited = now - waits_since_;
  stalls_.Post({.sequence = signature_.sequence,
                .operation = Summary(),
                .waited_s = waited.count(),
                .who = attendance.ToString()});
}

Status OperationGuard::NewsOr(const Status& otherwise) {
  const auto end = Clock::now() + kNewsGrace;
  for (;;) {
    if (Status told = Told(); !told.ok()) return told;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
    if (left.count() <= 0) return otherwise;
    WaitForNews(std::min(left, kProgressThreadSlice));
  }
}

void OperationGuard::WaitForNews(std::chrono::milliseconds longest) {
  if (!runner_.is_progress_thread) {
    failure_.WaitFor(longest);
    return;
  }
  const auto fds = lifeline_.PollFds();
  pollfd polled[2] = {{fds[0], POLLIN, 0}, {fds[1], POLLIN, 0}};
  ::poll(polled, 2, static_cast<int>(longest.count()));
  lifeline_.Service();
}

}  // namespace sparkdl
