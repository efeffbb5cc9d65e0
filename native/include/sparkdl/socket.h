// Options of the sockets that were handed over.
#ifndef SPARKDL_SOCKET_H_
#define SPARKDL_SOCKET_H_

#include "sparkdl/status.h"

namespace sparkdl {

// Makes the socket non-blocking and private to this program; on TCP, sends at once and lets the
// kernel notice a silent peer. Fails if fd is not a stream socket.
Status PrepareSocket(int fd, const char* what);

}  // namespace sparkdl

#endif  // SPARKDL_SOCKET_H_
