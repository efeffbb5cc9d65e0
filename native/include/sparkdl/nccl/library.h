// NCCL and the CUDA driver, loaded at run time. The only place that knows where they come from.
#ifndef SPARKDL_NCCL_LIBRARY_H_
#define SPARKDL_NCCL_LIBRARY_H_

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "sparkdl/nccl/symbols.h"
#include "sparkdl/status.h"

namespace sparkdl {

// Immutable and thread-safe. Never unloaded, because NCCL has threads of its own.
class NcclLibrary {
 public:
  // Loads from each list the first name or path that can be opened. If that fails, the status says
  // what was tried and why each candidate was rejected.
  static Result<std::shared_ptr<const NcclLibrary>> Load(
      const std::vector<std::string>& nccl_candidates,
      const std::vector<std::string>& cuda_candidates);

  const NcclSymbols& nccl() const { return nccl_; }
  const CudaSymbols& cuda() const { return cuda_; }

  // Path of the file that the dynamic linker loaded.
  const std::string& path() const { return path_; }

  // Version in the format of NCCL_VERSION_CODE: 22706 is 2.27.6.
  int version() const { return version_; }

  // Ok for success and for calls in progress. Otherwise the status says what was done, NCCL's texts
  // for the result and for the last error, and the hint that belongs to them.
  Status Check(NcclResult result, std::string_view what) const;

  Status CheckCuda(CudaResult result, std::string_view what) const;

  Result<NcclUniqueId> NewUniqueId() const;

  // Uuid and bus address of a GPU that this process sees, such as "GPU-..." and "0000:3b:00.0".
  // Allocates no memory on the GPU.
  struct GpuId {
    std::string uuid;
    std::string bus_id;
  };
  Result<GpuId> IdOfGpu(int ordinal) const;

 private:
  NcclLibrary() = default;

  NcclSymbols nccl_;
  CudaSymbols cuda_;
  std::string path_;
  int version_ = 0;
};

// Such as "2.27.6" for 22706.
std::string FormatNcclVersion(int version);

}  // namespace sparkdl

#endif  // SPARKDL_NCCL_LIBRARY_H_
