// What a fork() must not carry into the child: live sockets, and the belief to be a rank.
#ifndef SPARKDL_TCP_FORK_GUARD_H_
#define SPARKDL_TCP_FORK_GUARD_H_

#include <cstdint>
#include <utility>

#include "sparkdl/unique_fd.h"

namespace sparkdl {

// Grows by one in every child that this process forks and in theirs, so that an object can tell
// whether it was made by the process it is used in.
uint64_t ForkGeneration();

// A socket that a forked child does not hold open: there it becomes /dev/null. A data loader's
// process, forked from a rank, would otherwise keep the rank's lifelines open after its death, and
// nobody would hear of it.
class GuardedSocket {
 public:
  GuardedSocket() = default;
  explicit GuardedSocket(int fd);
  GuardedSocket(GuardedSocket&& other) noexcept : fd_(std::move(other.fd_)) {}
  GuardedSocket& operator=(GuardedSocket&& other) noexcept {
    if (this != &other) {
      Reset();
      fd_ = std::move(other.fd_);
    }
    return *this;
  }
  GuardedSocket(const GuardedSocket&) = delete;
  GuardedSocket& operator=(const GuardedSocket&) = delete;
  ~GuardedSocket() { Reset(); }

  int get() const { return fd_.get(); }
  bool valid() const { return fd_.valid(); }
  void Reset();

 private:
  UniqueFd fd_;
};

}  // namespace sparkdl

#endif  // SPARKDL_TCP_FORK_GUARD_H_
