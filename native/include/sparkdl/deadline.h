// Deadlines of operations that wait for their peers.
#ifndef SPARKDL_DEADLINE_H_
#define SPARKDL_DEADLINE_H_

#include <algorithm>
#include <chrono>

namespace sparkdl {

using Clock = std::chrono::steady_clock;

// A deadline whose time starts with the first call of Left() or Passed(). An operation that never
// has to sleep therefore never reads the clock, which would take a tenth of the time of a small
// allreduce.
class Deadline {
 public:
  explicit Deadline(double timeout_s) : timeout_s_(std::clamp(timeout_s, 0.0, kLongest)) {}

  double timeout_s() const { return timeout_s_; }

  // Time left, never negative.
  std::chrono::milliseconds Left() {
    const Clock::time_point now = Clock::now();
    if (!started_) {
      started_ = true;
      start_ = now;
    }
    const auto end = After(start_, timeout_s_);
    if (now >= end) return std::chrono::milliseconds(0);
    return std::max(std::chrono::milliseconds(1),
                    std::chrono::duration_cast<std::chrono::milliseconds>(end - now));
  }

  bool Passed() { return Left().count() == 0; }

  // Time point that lies `seconds` after `start`; `seconds` may be infinite.
  static Clock::time_point After(Clock::time_point start, double seconds) {
    return start + std::chrono::duration_cast<Clock::duration>(
                       std::chrono::duration<double>(std::min(seconds, kLongest)));
  }

 private:
  static constexpr double kLongest = 1e8;  // about three years; fits the ticks of a steady clock

  double timeout_s_;
  bool started_ = false;
  Clock::time_point start_;
};

}  // namespace sparkdl

#endif  // SPARKDL_DEADLINE_H_
