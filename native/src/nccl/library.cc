#include "sparkdl/nccl/library.h"

#include <array>
#include <cstdio>
#include <utility>

#include "nccl/dynamic_library.h"
#include "nccl/hints.h"

namespace sparkdl {
namespace {

std::string Join(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

Status FindAll(DynamicLibrary& library, NcclSymbols& symbols) {
#define SPARKDL_FIND(name, ...) \
  symbols.name = reinterpret_cast<decltype(symbols.name)>(library.Find(#name));
  SPARKDL_NCCL_SYMBOLS(SPARKDL_FIND)
  if (library.missing().empty()) return {};
  int version = 0;
  std::string found = "a version that does not tell its number";
  if (symbols.ncclGetVersion != nullptr &&
      symbols.ncclGetVersion(&version) == NcclResult::kSuccess) {
    found = FormatNcclVersion(version);
  }
  return Status(StatusCode::kFailed,
                library.path() + " is NCCL " + found + " and lacks " + Join(library.missing()) +
                    "; " + FormatNcclVersion(kOldestNcclVersion) + " or later is needed");
}

Status FindAll(DynamicLibrary& library, CudaSymbols& symbols) {
  SPARKDL_CUDA_SYMBOLS(SPARKDL_FIND)
#undef SPARKDL_FIND
  if (library.missing().empty()) return {};
  return Status(StatusCode::kFailed, library.path() + " lacks " + Join(library.missing()) +
                                         "; a driver of CUDA 11.4 or later is needed");
}

std::string TextOrNothing(const char* text) { return text != nullptr ? text : ""; }

}  // namespace

std::string FormatNcclVersion(int version) {
  // Up to 2.8 the version code had one digit fewer.
  const int major = version < 10000 ? version / 1000 : version / 10000;
  const int rest = version < 10000 ? version % 1000 : version % 10000;
  return std::to_string(major) + "." + std::to_string(rest / 100) + "." +
         std::to_string(rest % 100);
}

Result<std::shared_ptr<const NcclLibrary>> NcclLibrary::Load(
    const std::vector<std::string>& nccl_candidates,
    const std::vector<std::string>& cuda_candidates) {
  // The driver is loaded first: NCCL is useless without it, and its absence explains more.
  auto driver = DynamicLibrary::Open(cuda_candidates);
  if (!driver.ok()) return driver.status().Within("the CUDA driver cannot be loaded");
  auto nccl = DynamicLibrary::Open(nccl_candidates);
  if (!nccl.ok()) return nccl.status().Within("NCCL cannot be loaded");
  const std::shared_ptr<NcclLibrary> library(new NcclLibrary);
  SPARKDL_RETURN_IF_ERROR(FindAll(driver.value(), library->cuda_));
  SPARKDL_RETURN_IF_ERROR(FindAll(nccl.value(), library->nccl_));
  library->path_ = nccl.value().path();
  SPARKDL_RETURN_IF_ERROR(library->Check(library->nccl_.ncclGetVersion(&library->version_),
                                         "asking NCCL for its version"));
  if (library->version_ < kOldestNcclVersion) {
    return Status(StatusCode::kFailed,
                  library->path_ + " is NCCL " + FormatNcclVersion(library->version_) + "; " +
                      FormatNcclVersion(kOldestNcclVersion) + " or later is needed");
  }
  SPARKDL_RETURN_IF_ERROR(
      library->CheckCuda(library->cuda_.cuInit(0), "initializing the CUDA driver"));
  return std::shared_ptr<const NcclLibrary>(library);
}

Status NcclLibrary::Check(NcclResult result, std::string_view what) const {
  if (result == NcclResult::kSuccess || result == NcclResult::kInProgress) return {};
  // NCCL keeps the last error per process, not per communicator.
  const std::string last_error = TextOrNothing(nccl_.ncclGetLastError(nullptr));
  std::string text = std::string(what) + " failed: NCCL " + FormatNcclVersion(version_) +
                     " says \"" + TextOrNothing(nccl_.ncclGetErrorString(result)) + "\"";
  if (!last_error.empty()) text += " (" + last_error + ")";
  const std::string_view hint = NcclHintFor(result, last_error);
  if (!hint.empty()) text += ". " + std::string(hint);
  return Status(StatusCode::kFailed, std::move(text));
}

Status NcclLibrary::CheckCuda(CudaResult result, std::string_view what) const {
  if (result == CudaResult::kSuccess) return {};
  const char* name = nullptr;
  const char* text = nullptr;
  cuda_.cuGetErrorName(result, &name);
  cuda_.cuGetErrorString(result, &text);
  return Status(StatusCode::kFailed,
                std::string(what) + " failed: CUDA says " +
                    (name != nullptr ? name : std::to_string(static_cast<int>(result))) + ", \"" +
                    TextOrNothing(text) + "\"");
}

Result<NcclUniqueId> NcclLibrary::NewUniqueId() const {
  NcclUniqueId id = {};
  SPARKDL_RETURN_IF_ERROR(Check(nccl_.ncclGetUniqueId(&id), "making a unique id"));
  return id;
}

Result<NcclLibrary::GpuId> NcclLibrary::IdOfGpu(int ordinal) const {
  int count = 0;
  SPARKDL_RETURN_IF_ERROR(CheckCuda(cuda_.cuDeviceGetCount(&count), "counting the GPUs"));
  if (ordinal < 0 || ordinal >= count) {
    return Status(StatusCode::kInvalidArgument, "there is no GPU " + std::to_string(ordinal) +
                                                    ": this process sees " + std::to_string(count) +
                                                    " (CUDA_VISIBLE_DEVICES limits them)");
  }
  const std::string what = "asking for the identity of GPU " + std::to_string(ordinal);
  CudaDevice device = 0;
  CudaUuid uuid = {};
  std::array<char, 32> bus_id = {};
  SPARKDL_RETURN_IF_ERROR(CheckCuda(cuda_.cuDeviceGet(&device, ordinal), what));
  SPARKDL_RETURN_IF_ERROR(CheckCuda(cuda_.cuDeviceGetUuid_v2(&uuid, device), what));
  SPARKDL_RETURN_IF_ERROR(
      CheckCuda(cuda_.cuDeviceGetPCIBusId(bus_id.data(), bus_id.size(), device), what));
  GpuId id;
  id.uuid = "GPU-";
  for (size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) id.uuid += '-';
    std::array<char, 3> digits = {};
    std::snprintf(digits.data(), digits.size(), "%02x", uuid.bytes[i]);
    id.uuid += digits.data();
  }
  id.bus_id = bus_id.data();
  return id;
}

}  // namespace sparkdl
