// Protection against fork(): a child must neither hold live sockets nor act as a rank.
#ifndef SPARKDL_TCP_FORK_GUARD_H_
#define SPARKDL_TCP_FORK_GUARD_H_

#include <cstdint>
#include <utility>

#include "sparkdl/unique_fd.h"

namespace sparkdl {

// Increases by one in every child that this process forks, and again in their children, so that an
// object can tell whether it is used in the process that created it.
uint64_t ForkGeneration();

// A socket that a forked child does not hold open: in the child its descriptor refers to /dev/null.
// Otherwise a data loader's process, forked from a rank, would keep the rank's lifelines open after
// the rank's death, and no peer would notice it.
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
