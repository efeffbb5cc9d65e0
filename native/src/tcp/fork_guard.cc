#include "sparkdl/tcp/fork_guard.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <set>

namespace sparkdl {
namespace {

// Never destroyed: a communicator may outlive the static objects of this file.
struct Registry {
  std::mutex mutex;
  std::set<int> fds;  // guarded by mutex
  std::atomic<uint64_t> generation{0};
};

Registry& TheRegistry() {
  static auto* registry = new Registry;
  return *registry;
}

void BeforeFork() { TheRegistry().mutex.lock(); }
void InParent() { TheRegistry().mutex.unlock(); }

// Makes only calls that are safe between fork and exec. The descriptor numbers stay in use, so that
// closing them later closes nothing else.
void InChild() {
  Registry& registry = TheRegistry();
  registry.generation.fetch_add(1, std::memory_order_relaxed);
  const int null_fd = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int fd : registry.fds) {
    if (null_fd >= 0) {
      ::dup3(null_fd, fd, O_CLOEXEC);
    } else {
      ::close(fd);
    }
  }
  if (null_fd >= 0) ::close(null_fd);
  registry.mutex.unlock();
}

}  // namespace

// Every communicator calls this, even one without sockets, so that the handlers are registered
// before the first communicator can be forked.
uint64_t ForkGeneration() {
  static const int is_registered = ::pthread_atfork(&BeforeFork, &InParent, &InChild);
  static_cast<void>(is_registered);
  return TheRegistry().generation.load(std::memory_order_relaxed);
}

GuardedSocket::GuardedSocket(int fd) : fd_(fd) {
  if (fd < 0) return;
  static_cast<void>(ForkGeneration());
  Registry& registry = TheRegistry();
  const std::scoped_lock lock(registry.mutex);
  registry.fds.insert(fd);
}

void GuardedSocket::Reset() {
  if (!fd_.valid()) return;
  // Closed under the lock: otherwise a child forked in between would hold it open.
  Registry& registry = TheRegistry();
  const std::scoped_lock lock(registry.mutex);
  registry.fds.erase(fd_.get());
  fd_.Reset();
}

}  // namespace sparkdl
