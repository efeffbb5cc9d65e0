#include "nccl/gpu.h"

#include <utility>

namespace sparkdl {

Result<std::shared_ptr<const Gpu>> Gpu::Open(std::shared_ptr<const NcclLibrary> library,
                                             int ordinal) {
  const auto id = library->IdOfGpu(ordinal);
  SPARKDL_RETURN_IF_ERROR(id.status());
  const std::string what = "opening GPU " + std::to_string(ordinal);
  CudaDevice device = 0;
  SPARKDL_RETURN_IF_ERROR(library->CheckCuda(library->cuda().cuDeviceGet(&device, ordinal), what));
  CudaContext context = nullptr;
  SPARKDL_RETURN_IF_ERROR(
      library->CheckCuda(library->cuda().cuDevicePrimaryCtxRetain(&context, device), what));
  return std::shared_ptr<const Gpu>(new Gpu(std::move(library), ordinal, device, context));
}

Gpu::~Gpu() { library_->cuda().cuDevicePrimaryCtxRelease_v2(device_); }

Gpu::Current::Current(const Gpu& gpu)
    : gpu_(gpu),
      status_(gpu.library().CheckCuda(gpu.library().cuda().cuCtxPushCurrent_v2(gpu.context_),
                                      "making the GPU current")) {}

Gpu::Current::~Current() {
  CudaContext popped = nullptr;
  if (status_.ok()) gpu_.library().cuda().cuCtxPopCurrent_v2(&popped);
}

Status Gpu::CheckPointer(const void* pointer, std::string_view name) const {
  int ordinal = -1;
  const CudaResult result = library_->cuda().cuPointerGetAttribute(
      static_cast<void*>(&ordinal), kCudaPointerDeviceOrdinal, reinterpret_cast<uint64_t>(pointer));
  if (result == CudaResult::kInvalidValue) {
    return Status(StatusCode::kInvalidArgument,
                  std::string(name) + " is not in memory that CUDA knows; NCCL " +
                      "takes memory of GPU " + std::to_string(ordinal_));
  }
  SPARKDL_RETURN_IF_ERROR(library_->CheckCuda(result, "asking where a buffer lies"));
  if (ordinal != ordinal_) {
    return Status(StatusCode::kInvalidArgument,
                  std::string(name) + " is in memory of GPU " + std::to_string(ordinal) +
                      ", but the communicator is on GPU " + std::to_string(ordinal_));
  }
  return {};
}

Result<bool> Gpu::IsCapturing(CudaStream stream) const {
  int capturing = 0;
  SPARKDL_RETURN_IF_ERROR(
      library_->CheckCuda(library_->cuda().cuStreamIsCapturing(stream, &capturing),
                          "asking whether the stream is being captured"));
  return capturing != 0;
}

}  // namespace sparkdl
