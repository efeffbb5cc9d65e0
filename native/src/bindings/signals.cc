#include "bindings/signals.h"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <vector>

#include "bindings/errors.h"
#include "sparkdl/status.h"

namespace sparkdl::bindings {
namespace {

// Communicators in whose calls this thread is: more than one if a handler calls another one.
thread_local std::vector<const void*> calls;

}  // namespace

bool HasSignal() {
  const nanobind::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;
}

InterruptibleCall::InterruptibleCall(const void* communicator) {
  RaiseIfInside(communicator);
  calls.push_back(communicator);
}

InterruptibleCall::~InterruptibleCall() { calls.pop_back(); }

void InterruptibleCall::RaiseIfInside(const void* communicator) {
  if (std::find(calls.begin(), calls.end(), communicator) == calls.end()) return;
  RaiseIfError(Status(StatusCode::kFailed,
                      "a signal handler called the communicator in the middle of another call, "
                      "which ends only after the handler: set a flag in the handler, and act on "
                      "it between two operations"));
}

}  // namespace sparkdl::bindings
