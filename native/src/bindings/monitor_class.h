// Python's Monitor: measurements of a communicator's operations.
#ifndef SPARKDL_BINDINGS_MONITOR_CLASS_H_
#define SPARKDL_BINDINGS_MONITOR_CLASS_H_

#include <nanobind/nanobind.h>

#include <memory>

#include "sparkdl/operation_monitor.h"

namespace sparkdl::bindings {

namespace nb = nanobind;

// Keeps the monitor alive, but not the communicator.
struct Monitor {
  std::shared_ptr<OperationMonitor> monitor;
};

void DefineMonitor(nb::module_& module);

}  // namespace sparkdl::bindings

#endif  // SPARKDL_BINDINGS_MONITOR_CLASS_H_
