#include "nccl/hints.h"

#include <optional>

namespace sparkdl {
namespace {

struct Hint {
  // Empty for any result.
  std::optional<NcclResult> result;
  // Text that must occur in the last error; empty matches all.
  std::string_view words;
  std::string_view advice;
};

// The first match counts, so specific hints stand before those for every error of a kind.
constexpr Hint kHints[] = {
    {std::nullopt, "Duplicate GPU detected",
     "Two ranks use one GPU, which NCCL refuses: give every rank a GPU of its own (by "
     "CUDA_VISIBLE_DEVICES or the device that it opens), or let ranks that share one communicate "
     "through host memory."},
    {std::nullopt, "Mismatched NCCL version",
     "The ranks have loaded different versions of NCCL: install the same one everywhere."},
    {std::nullopt, "no socket interface found",
     "Name a network interface that all hosts can reach in NCCL_SOCKET_IFNAME."},
    {std::nullopt, "No usable listening interface",
     "Name a network interface that all hosts can reach in NCCL_SOCKET_IFNAME."},
    {std::nullopt, "shared memory",
     "/dev/shm is too small or not writable: give the container more (docker run --shm-size=1g), "
     "or set NCCL_SHM_DISABLE=1, which is slower."},
    {std::nullopt, "Too many open files", "Raise the limit of open files (ulimit -n)."},
    {std::nullopt, "out of memory",
     "The GPU's memory is full, and NCCL needs some of it: make the batch smaller, or end what "
     "else "
     "uses the GPU."},
    {std::nullopt, "driver version is insufficient",
     "This NCCL was built for a newer CUDA than the driver has: install the nvidia-nccl-cu* wheel "
     "of the driver's CUDA version, or a newer driver."},
    {std::nullopt, "Cuda failure",
     "The GPU may have failed before NCCL was called: run with CUDA_LAUNCH_BLOCKING=1, and look at "
     "nvidia-smi and the kernel's log for Xid errors."},
    {std::nullopt, "Connection closed by remote peer",
     "A peer's process has ended: look at the errors of the other ranks first."},
    {std::nullopt, "Connection refused",
     "A host cannot be reached by the address that NCCL took: name the right network interface in "
     "NCCL_SOCKET_IFNAME, and let the firewall pass its ports."},
    {std::nullopt, "No route to host",
     "A host cannot be reached by the address that NCCL took: name the right network interface in "
     "NCCL_SOCKET_IFNAME, and let the firewall pass its ports."},
    {NcclResult::kUnhandledCudaError, "",
     "Run with NCCL_DEBUG=INFO to see which CUDA call failed; with CUDA_LAUNCH_BLOCKING=1 an "
     "earlier kernel that failed is named instead."},
    {NcclResult::kSystemError, "",
     "Run with NCCL_DEBUG=INFO to see which call failed; where hosts have several network "
     "interfaces, name the one to use in NCCL_SOCKET_IFNAME."},
    {NcclResult::kInternalError, "",
     "Run with NCCL_DEBUG=INFO to see more; another version of NCCL may not have the fault."},
    {NcclResult::kInvalidArgument, "",
     "Run with NCCL_DEBUG=WARN to see which argument; all ranks must call the same operations in "
     "the same order."},
    {NcclResult::kInvalidUsage, "",
     "Run with NCCL_DEBUG=WARN to see more; all ranks must call the same operations in the same "
     "order."},
    {NcclResult::kRemoteError, "",
     "A peer's process has ended or the network to it failed: look at the errors of the other "
     "ranks first."},
};

}  // namespace

std::string_view NcclHintFor(NcclResult result, std::string_view last_error) {
  for (const Hint& hint : kHints) {
    const bool same_result = !hint.result.has_value() || *hint.result == result;
    if (same_result && last_error.find(hint.words) != std::string_view::npos) return hint.advice;
  }
  return {};
}

}  // namespace sparkdl
