// The one place where a Status becomes a Python exception.
#ifndef SPARKDL_BINDINGS_ERRORS_H_
#define SPARKDL_BINDINGS_ERRORS_H_

#include <string>

#include "sparkdl/status.h"

namespace sparkdl::bindings {

// Raises the exception of sparkdl.errors that belongs to the status; for kInterrupted, the
// exception that the signal handler raised. Needs the GIL. Does nothing if the status is ok.
void RaiseIfError(const Status& status);

// Raises ParamError.
[[noreturn]] void RaiseInvalid(const std::string& text);

}  // namespace sparkdl::bindings

#endif  // SPARKDL_BINDINGS_ERRORS_H_
