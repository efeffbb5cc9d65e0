// Libraries that are opened at run time, and their symbols.
#ifndef SPARKDL_NCCL_DYNAMIC_LIBRARY_H_
#define SPARKDL_NCCL_DYNAMIC_LIBRARY_H_

#include <string>
#include <vector>

#include "sparkdl/status.h"

namespace sparkdl {

// Never closed.
class DynamicLibrary {
 public:
  // Opens the first of the candidates (names or paths) that can be opened.
  static Result<DynamicLibrary> Open(const std::vector<std::string>& candidates);

  // Null if the library has no such symbol, whose name is then added to missing().
  void* Find(const char* name);

  // Path of the file that was opened.
  std::string path() const;

  // Names that Find() did not find.
  const std::vector<std::string>& missing() const { return missing_; }

 private:
  DynamicLibrary(void* handle, std::string name) : handle_(handle), name_(std::move(name)) {}

  void* handle_;
  std::string name_;
  std::vector<std::string> missing_;
};

}  // namespace sparkdl

#endif  // SPARKDL_NCCL_DYNAMIC_LIBRARY_H_
