#include "sparkdl/futex.h"

#ifndef __linux__
#error "sparkdl waits on futexes and needs Linux"
#endif

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <ctime>

namespace sparkdl {

FutexWake FutexWait(const std::atomic<uint32_t>& word, uint32_t expected,
                    std::chrono::milliseconds longest) {
  const auto milliseconds = longest.count();
  timespec wait{};
  wait.tv_sec = static_cast<time_t>(milliseconds / 1000);
  wait.tv_nsec =
      static_cast<long>((milliseconds % 1000) * 1'000'000);  // NOLINT(google-runtime-int)
  // Not FUTEX_PRIVATE_FLAG: the word may lie in a segment that other processes map at other
  // addresses.
  const auto rc = ::syscall(SYS_futex, &word, FUTEX_WAIT, expected, &wait, nullptr, 0);
  if (rc == 0 || errno == EAGAIN) return FutexWake::kWokenOrChanged;
  return errno == EINTR ? FutexWake::kSignal : FutexWake::kTimedOut;
}

void FutexWakeAll(const std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace sparkdl
