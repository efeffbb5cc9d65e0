#include "bindings/errors.h"

#include <nanobind/nanobind.h>

#include <string>

#include "bindings/text.h"

namespace sparkdl::bindings {
namespace {

nb::object ExceptionClass(StatusCode code) {
  const char* name = "CommunicatorError";
  switch (code) {
    case StatusCode::kInvalidArgument:
      name = "ParamError";
      break;
    case StatusCode::kTimeout:
      name = "CommunicatorTimeoutError";
      break;
    case StatusCode::kAborted:
      name = "CommunicatorAbortedError";
      break;
    case StatusCode::kRankLost:
      name = "RankLostError";
      break;
    case StatusCode::kMismatch:
      name = "MismatchError";
      break;
    case StatusCode::kOk:
    case StatusCode::kDisagreement:
    case StatusCode::kFailed:
    case StatusCode::kInterrupted:
      break;
  }
  return nb::module_::import_("sparkdl.errors").attr(name);
}

}  // namespace

void RaiseIfError(const Status& status) {
  if (status.ok()) return;
  if (status.code() == StatusCode::kInterrupted && PyErr_Occurred() != nullptr) {
    throw nb::python_error();
  }
  const nb::object exception = ExceptionClass(status.code());
  PyErr_SetObject(exception.ptr(), ToPythonText(status.ToString()).ptr());
  throw nb::python_error();
}

void RaiseInvalid(const std::string& text) {
  RaiseIfError(Status(StatusCode::kInvalidArgument, text));
  throw nb::python_error();
}

}  // namespace sparkdl::bindings
