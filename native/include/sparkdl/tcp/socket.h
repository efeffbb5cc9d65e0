// Options of the sockets that were handed over.
#ifndef SPARKDL_TCP_SOCKET_H_
#define SPARKDL_TCP_SOCKET_H_

#include "sparkdl/status.h"

namespace sparkdl {

// Makes the socket non-blocking and private to this program; on TCP, sends at once. Fails if fd is
// not a stream socket.
Status PrepareSocket(int fd, const char* what);

// On TCP, has the kernel break the connection when the peer's machine has been silent for some
// seconds. For sockets whose peer reads what it is sent without delay: to the kernel a full buffer
// looks like silence.
Status WatchPeer(int fd, const char* what);

}  // namespace sparkdl

#endif  // SPARKDL_TCP_SOCKET_H_
