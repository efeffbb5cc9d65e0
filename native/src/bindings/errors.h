// The one place where a Status becomes a Python exception.
#ifndef SPARKDL_BINDINGS_ERRORS_H_
#define SPARKDL_BINDINGS_ERRORS_H_

#include "sparkdl/status.h"

namespace sparkdl::bindings {

// Raises the exception of sparkdl.errors (or ValueError, TypeError) that belongs to the status; for
// kInterrupted the one that the signal's handler left. Needs the GIL. Does nothing if ok.
void RaiseIfError(const Status& status);

}  // namespace sparkdl::bindings

#endif  // SPARKDL_BINDINGS_ERRORS_H_
