#include "nccl/dynamic_library.h"

#include <dlfcn.h>
#include <link.h>

#include <utility>

namespace sparkdl {

Result<DynamicLibrary> DynamicLibrary::Open(const std::vector<std::string>& candidates) {
  std::string tried;
  for (const std::string& candidate : candidates) {
    // RTLD_LOCAL, because another NCCL may already be in the process, linked into torch.
    void* handle = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) return DynamicLibrary(handle, candidate);
    const char* reason = dlerror();
    if (!tried.empty()) tried += "; ";
    tried += candidate + " (" + (reason != nullptr ? reason : "no reason given") + ")";
  }
  return Status(StatusCode::kFailed, "tried " + (tried.empty() ? "nothing" : tried));
}

void* DynamicLibrary::Find(const char* name) {
  void* symbol = dlsym(handle_, name);
  if (symbol == nullptr) missing_.emplace_back(name);
  return symbol;
}

std::string DynamicLibrary::path() const {
  link_map* map = nullptr;
  if (dlinfo(handle_, RTLD_DI_LINKMAP, static_cast<void*>(&map)) != 0 || map == nullptr) {
    return name_;
  }
  return map->l_name;
}

}  // namespace sparkdl
