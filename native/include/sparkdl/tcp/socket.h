// Options of the sockets that are handed to the core.
#ifndef SPARKDL_TCP_SOCKET_H_
#define SPARKDL_TCP_SOCKET_H_

#include "sparkdl/status.h"

namespace sparkdl {

// Makes the socket non-blocking and close-on-exec; on TCP, makes it send without delay. Fails if fd
// is not a stream socket.
Status PrepareSocket(int fd, const char* what);

// On TCP, makes the kernel break the connection when the peer's machine has been silent for some
// seconds. Only for sockets whose peer reads without delay, because the kernel takes a full buffer
// for silence.
Status WatchPeer(int fd, const char* what);

}  // namespace sparkdl

#endif  // SPARKDL_TCP_SOCKET_H_
