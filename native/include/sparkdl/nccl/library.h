// NCCL and the CUDA driver, loaded at run time. The only place that knows where they come from.
#ifndef SPARKDL_NCCL_LIBRARY_H_
#define SPARKDL_NCCL_LIBRARY_H_

#include <memory>
#include <string>
#include <vector>

#include "sparkdl/nccl/symbols.h"
#include "sparkdl/status.h"

namespace sparkdl {

// Immutable and thread-safe. Never unloaded: NCCL has threads of its own.
class NcclLibrary {
 public:
  // Takes the first of each list's names or paths that can be opened. The failure says what was
  // tried and why each did not do.
  static Result<std::shared_ptr<const NcclLibrary>> Load(
      const std::vector<std::string>& nccl_candidates,
      const std::vector<std::string>& cuda_candidates);

  const NcclSymbols& nccl() const { return nccl_; }
  const CudaSymbols& cuda() const { return cuda_; }

  // The file that the dynamic linker took.
  const std::string& path() const { return path_; }

  // As NCCL_VERSION_CODE: 22706 is 2.27.6.
  int version() const { return version_; }

  // Ok for success and for what is merely in progress. Otherwise what was done, NCCL's texts for
  // the result and for the last error, and the hint that belongs to them.
  Status Check(NcclResult result, const std::string& what) const;

  Status CheckCuda(CudaResult result, const std::string& what) const;

  Result<NcclUniqueId> NewUniqueId() const;

  // Uuid and bus address of a GPU that this process sees, "GPU-... at 0000:3b:00.0". Takes no
  // memory of it.
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

// "2.27.6" for 22706.
std::string FormatNcclVersion(int version);

}  // namespace sparkdl

#endif  // SPARKDL_NCCL_LIBRARY_H_
