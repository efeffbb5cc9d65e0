#include "bindings/handle_class.h"

#include <nanobind/stl/optional.h>

#include <limits>

#include "bindings/errors.h"
#include "bindings/signals.h"
#include "sparkdl/communicator.h"

namespace sparkdl::bindings {
namespace {

void WaitFor(const Handle& handle, std::optional<double> timeout_s) {
  Status status;
  if (handle.pending->done()) {  // releasing the GIL takes longer than this
    status = handle.pending->status();
  } else {
    const nb::gil_scoped_release release;
    // Every operation has a deadline of its own, so this also ends without a timeout.
    status = Communicator::Wait(
        *handle.pending, timeout_s.value_or(std::numeric_limits<double>::infinity()), &HasSignal);
  }
  handle.held->LetGoOfDone();
  RaiseIfError(status);
}

}  // namespace

void DefineHandle(nb::module_& module) {
  using nb::literals::operator""_a;
  nb::class_<Handle>(module, "Handle",
                     "A submitted operation. Its arrays stay alive until it is done.")
      .def("wait", &WaitFor, "timeout_s"_a = nb::none(),
           "Wait until the operation is done, and raise its error if it failed.\n\n"
           "Raises CommunicatorTimeoutError if the operation is not done after timeout_s "
           "seconds; it then continues and can be waited for again.")
      .def(
          "done", [](const Handle& handle) { return handle.pending->done(); },
          "Whether the operation has finished or failed; its arrays can then be used again.");
}

}  // namespace sparkdl::bindings
