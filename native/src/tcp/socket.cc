#include "sparkdl/tcp/socket.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <string>

namespace sparkdl {
namespace {

// A host that vanished without closing its connections (power, cable) is given up after about
// kKeepaliveIdleS + kKeepaliveProbes * kKeepaliveIntervalS seconds. The death of a process is
// noticed at once; this time only has to be longer than a hiccup of the network.
constexpr int kKeepaliveIdleS = 5;
constexpr int kKeepaliveIntervalS = 2;
constexpr int kKeepaliveProbes = 5;
constexpr int kUnacknowledgedMs = 1000 * (kKeepaliveIdleS + kKeepaliveProbes * kKeepaliveIntervalS);

bool SetOption(int fd, int level, int option, int value) {
  return ::setsockopt(fd, level, option, &value, sizeof(value)) == 0;
}

std::string NameOf(int fd, const char* what) {
  return std::string(what) + " (file descriptor " + std::to_string(fd) + ")";
}

Result<bool> IsTcp(int fd, const char* what) {
  int domain = 0;
  socklen_t length = sizeof(domain);
  if (::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length) != 0) {
    return Status::FromErrno("cannot read the domain of " + NameOf(fd, what), errno);
  }
  return domain == AF_INET || domain == AF_INET6;
}

}  // namespace

Status PrepareSocket(int fd, const char* what) {
  const std::string name = NameOf(fd, what);
  int type = 0;
  socklen_t length = sizeof(type);
  if (::getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) != 0) {
    return Status(StatusCode::kInvalidArgument, name + " must be a connected stream socket");
  }
  if (type != SOCK_STREAM) {
    return Status(StatusCode::kInvalidArgument,
                  name + " must be a stream socket, its type is " + std::to_string(type));
  }
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0 ||
      ::fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) {
    return Status::FromErrno("cannot make " + name + " non-blocking", errno);
  }
  const auto is_tcp = IsTcp(fd, what);
  if (!is_tcp.ok()) return is_tcp.status();
  if (!is_tcp.value() || SetOption(fd, IPPROTO_TCP, TCP_NODELAY, 1)) return {};
  return Status::FromErrno("cannot make " + name + " send at once", errno);
}

Status WatchPeer(int fd, const char* what) {
  const auto is_tcp = IsTcp(fd, what);
  if (!is_tcp.ok()) return is_tcp.status();
  if (!is_tcp.value()) return {};
  const bool is_set = SetOption(fd, SOL_SOCKET, SO_KEEPALIVE, 1) &&
                      SetOption(fd, IPPROTO_TCP, TCP_KEEPIDLE, kKeepaliveIdleS) &&
                      SetOption(fd, IPPROTO_TCP, TCP_KEEPINTVL, kKeepaliveIntervalS) &&
                      SetOption(fd, IPPROTO_TCP, TCP_KEEPCNT, kKeepaliveProbes) &&
                      SetOption(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, kUnacknowledgedMs);
  if (is_set) return {};
  return Status::FromErrno("cannot set the TCP options of " + NameOf(fd, what), errno);
}

}  // namespace sparkdl
