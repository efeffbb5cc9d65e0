// Operations that some ranks have not joined for a long time, and how the application learns of
// them.
#ifndef SPARKDL_STALL_BOARD_H_
#define SPARKDL_STALL_BOARD_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <mutex>
#include <optional>
#include <string>

namespace sparkdl {

struct StallOptions {
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  double warn_after_s = kNever;  // and again after each such interval
  double abort_after_s = kNever;
  // An eventfd that is written to when there is a notice; it remains the caller's. -1: none.
  int notice_fd = -1;

  bool is_on() const { return warn_after_s != kNever || abort_after_s != kNever; }
};

struct StallNotice {
  uint64_t sequence = 0;
  std::string operation;
  double waited_s = 0.0;
  std::string who;  // "ranks 1, 3 had not joined"
};

// An operation that has made no progress since some time.
struct Wait {
  std::string operation;
  std::chrono::steady_clock::time_point since;
  double timeout_s = 0.0;  // the operation's timeout
};

// Holds the latest notice until it is taken, and the current wait if it has lasted long enough to
// be reported. Thread-safe.
class StallBoard {
 public:
  explicit StallBoard(const StallOptions& options) : options_(options) {}

  const StallOptions& options() const { return options_; }

  void Post(StallNotice notice);
  std::optional<StallNotice> Take();

  void BeginWait(Wait wait);
  // Cheap if there is no wait.
  void EndWait();
  bool has_wait() const { return has_wait_.load(std::memory_order_relaxed); }
  std::optional<Wait> wait() const;

 private:
  const StallOptions options_;
  std::atomic<bool> has_wait_{false};
  mutable std::mutex mutex_;
  std::optional<Wait> wait_;  // guarded by mutex_, like the next
  std::optional<StallNotice> notice_;
};

}  // namespace sparkdl

#endif  // SPARKDL_STALL_BOARD_H_
