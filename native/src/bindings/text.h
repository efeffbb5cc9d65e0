// Conversion of the core's text to Python.
#ifndef SPARKDL_BINDINGS_TEXT_H_
#define SPARKDL_BINDINGS_TEXT_H_

#include <nanobind/nanobind.h>

#include <string>

namespace sparkdl::bindings {

namespace nb = nanobind;

// A reason may come from a peer: bytes that are not UTF-8 are replaced, not rejected.
inline nb::str ToPythonText(const std::string& text) {
  return nb::steal<nb::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

}  // namespace sparkdl::bindings

#endif  // SPARKDL_BINDINGS_TEXT_H_
