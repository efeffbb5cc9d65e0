// Python's Handle, and the references that keep the arrays of operations alive.
#ifndef SPARKDL_BINDINGS_HANDLE_CLASS_H_
#define SPARKDL_BINDINGS_HANDLE_CLASS_H_

#include <nanobind/nanobind.h>

#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/array_argument.h"
#include "sparkdl/pending_operation.h"

namespace sparkdl::bindings {

namespace nb = nanobind;

using Arguments = std::vector<ArrayArgument>;

// Holds the arrays of submitted operations until these are done, even if the user has dropped the
// handle. The next call from Python releases them, not the progress thread, which never needs the
// GIL and so can never wait for it. All methods need the GIL.
class HeldArrays {
 public:
  void Hold(std::shared_ptr<PendingOperation> pending, Arguments arguments) {
    held_.emplace_back(std::move(pending), std::move(arguments));
  }

  // Operations finish in the order of submission.
  void LetGoOfDone() {
    while (!held_.empty() && held_.front().first->done()) {
      // Releasing the arrays may run Python code that calls this method: remove them from the queue
      // first.
      const auto done = std::move(held_.front());
      held_.pop_front();
    }
  }

 private:
  std::deque<std::pair<std::shared_ptr<PendingOperation>, Arguments>> held_;
};

struct Handle {
  std::shared_ptr<PendingOperation> pending;
  std::shared_ptr<HeldArrays> held;
};

void DefineHandle(nb::module_& module);

}  // namespace sparkdl::bindings

#endif  // SPARKDL_BINDINGS_HANDLE_CLASS_H_
