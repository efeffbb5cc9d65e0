// A GPU as NCCL uses it: made current on a thread, with checks of pointers and of streams.
#ifndef SPARKDL_NCCL_GPU_H_
#define SPARKDL_NCCL_GPU_H_

#include <memory>
#include <string_view>

#include "sparkdl/nccl/library.h"
#include "sparkdl/status.h"

namespace sparkdl {

// Holds the GPU's primary context, the one that the CUDA runtime and torch use. Thread-safe.
class Gpu {
 public:
  static Result<std::shared_ptr<const Gpu>> Open(std::shared_ptr<const NcclLibrary> library,
                                                 int ordinal);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  const NcclLibrary& library() const { return *library_; }
  int ordinal() const { return ordinal_; }

  // Makes the GPU current on this thread as long as the object lives.
  class Current {
   public:
    explicit Current(const Gpu& gpu);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    const Status& status() const { return status_; }

   private:
    const Gpu& gpu_;
    Status status_;
  };

  // Ok if the pointer is to memory of this GPU, or to memory that the GPU accesses as its own.
  Status CheckPointer(const void* pointer, std::string_view name) const;

  Result<bool> IsCapturing(CudaStream stream) const;

 private:
  Gpu(std::shared_ptr<const NcclLibrary> library, int ordinal, CudaDevice device,
      CudaContext context)
      : library_(std::move(library)), ordinal_(ordinal), device_(device), context_(context) {}

  const std::shared_ptr<const NcclLibrary> library_;
  const int ordinal_;
  const CudaDevice device_;
  const CudaContext context_;
};

}  // namespace sparkdl

#endif  // SPARKDL_NCCL_GPU_H_
