// Sleeping on a 32-bit word until another thread or process changes it.
#ifndef SPARKDL_FUTEX_H_
#define SPARKDL_FUTEX_H_

#include <atomic>
#include <chrono>
#include <cstdint>

namespace sparkdl {

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4,
              "a futex word in shared memory must be a plain 32-bit word");

enum class FutexWake : uint8_t { kWokenOrChanged, kTimedOut, kSignal };

// Sleeps while word == expected, at most for the given time. Works between processes that map the
// word.
FutexWake FutexWait(const std::atomic<uint32_t>& word, uint32_t expected,
                    std::chrono::milliseconds longest);

// Wakes all threads that sleep on the word.
void FutexWakeAll(const std::atomic<uint32_t>& word);

// Hints to the core that this is a spin loop.
inline void SpinPause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

}  // namespace sparkdl

#endif  // SPARKDL_FUTEX_H_
