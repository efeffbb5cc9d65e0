// The parts of NCCL and of the CUDA driver that sparkdl uses: the types, declared here so that the
// build needs the headers of neither, and the one list of symbols that are looked up at run time.
#ifndef SPARKDL_NCCL_SYMBOLS_H_
#define SPARKDL_NCCL_SYMBOLS_H_

#include <cstddef>
#include <cstdint>

namespace sparkdl {

// NCCL's C interface. Names and values are those of nccl.h, which only appends new ones.

struct NcclCommRecord;
using NcclComm = NcclCommRecord*;

inline constexpr size_t kNcclUniqueIdBytes = 128;
struct NcclUniqueId {
  char bytes[kNcclUniqueIdBytes];
};

// NOLINTNEXTLINE(performance-enum-size): C functions return it as an int
enum class NcclResult : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
  kTimeout = 8,
};

// ncclConfig_t as of 2.14, the first version that has it. A later library reads only the fields
// that the struct has according to its size and version, and uses its own defaults for the others.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21400;
  int blocking = 0;
};

inline constexpr int kNcclNoColor = -1;
inline constexpr int kNcclScalarHostImmediate = 1;

// 2.18 introduced ncclCommSplit; older versions are not supported.
inline constexpr int kOldestNcclVersion = 21800;

// CUDA's driver interface. Every machine with a GPU has it in one place and in one version,
// whichever CUDA runtimes NCCL and torch bring. Streams and events are the same objects in the
// driver and in the runtime.

struct CudaContextRecord;
using CudaContext = CudaContextRecord*;
struct CudaEventRecord;
using CudaEvent = CudaEventRecord*;
struct CudaStreamRecord;
using CudaStream = CudaStreamRecord*;
using CudaDevice = int;

struct CudaUuid {
  unsigned char bytes[16];
};

// NOLINTNEXTLINE(performance-enum-size): likewise
enum class CudaResult : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kNotReady = 600,
};

inline constexpr unsigned int kCudaEventDisableTiming = 2;
inline constexpr int kCudaCaptureModeThreadLocal = 1;
inline constexpr int kCudaPointerDeviceOrdinal = 9;

}  // namespace sparkdl

// SYMBOL(name, result type, argument types)
#define SPARKDL_NCCL_SYMBOLS(SYMBOL)                                                              \
  SYMBOL(ncclGetVersion, NcclResult, int*)                                                        \
  SYMBOL(ncclGetErrorString, const char*, NcclResult)                                             \
  SYMBOL(ncclGetLastError, const char*, NcclComm)                                                 \
  SYMBOL(ncclGetUniqueId, NcclResult, NcclUniqueId*)                                              \
  SYMBOL(ncclCommInitRankConfig, NcclResult, NcclComm*, int, NcclUniqueId, int, NcclConfig*)      \
  SYMBOL(ncclCommSplit, NcclResult, NcclComm, int, int, NcclComm*, NcclConfig*)                   \
  SYMBOL(ncclCommGetAsyncError, NcclResult, NcclComm, NcclResult*)                                \
  SYMBOL(ncclCommFinalize, NcclResult, NcclComm)                                                  \
  SYMBOL(ncclCommDestroy, NcclResult, NcclComm)                                                   \
  SYMBOL(ncclCommAbort, NcclResult, NcclComm)                                                     \
  SYMBOL(ncclGroupStart, NcclResult)                                                              \
  SYMBOL(ncclGroupEnd, NcclResult)                                                                \
  SYMBOL(ncclAllReduce, NcclResult, const void*, void*, size_t, int, int, NcclComm, CudaStream)   \
  SYMBOL(ncclReduceScatter, NcclResult, const void*, void*, size_t, int, int, NcclComm,           \
         CudaStream)                                                                              \
  SYMBOL(ncclReduce, NcclResult, const void*, void*, size_t, int, int, int, NcclComm, CudaStream) \
  SYMBOL(ncclAllGather, NcclResult, const void*, void*, size_t, int, NcclComm, CudaStream)        \
  SYMBOL(ncclBroadcast, NcclResult, const void*, void*, size_t, int, int, NcclComm, CudaStream)   \
  SYMBOL(ncclSend, NcclResult, const void*, size_t, int, int, NcclComm, CudaStream)               \
  SYMBOL(ncclRecv, NcclResult, void*, size_t, int, int, NcclComm, CudaStream)                     \
  SYMBOL(ncclRedOpCreatePreMulSum, NcclResult, int*, void*, int, int, NcclComm)                   \
  SYMBOL(ncclRedOpDestroy, NcclResult, int, NcclComm)

#define SPARKDL_CUDA_SYMBOLS(SYMBOL)                                     \
  SYMBOL(cuInit, CudaResult, unsigned int)                               \
  SYMBOL(cuGetErrorName, CudaResult, CudaResult, const char**)           \
  SYMBOL(cuGetErrorString, CudaResult, CudaResult, const char**)         \
  SYMBOL(cuDeviceGetCount, CudaResult, int*)                             \
  SYMBOL(cuDeviceGet, CudaResult, CudaDevice*, int)                      \
  SYMBOL(cuDeviceGetUuid_v2, CudaResult, CudaUuid*, CudaDevice)          \
  SYMBOL(cuDeviceGetPCIBusId, CudaResult, char*, int, CudaDevice)        \
  SYMBOL(cuDevicePrimaryCtxRetain, CudaResult, CudaContext*, CudaDevice) \
  SYMBOL(cuDevicePrimaryCtxRelease_v2, CudaResult, CudaDevice)           \
  SYMBOL(cuCtxPushCurrent_v2, CudaResult, CudaContext)                   \
  SYMBOL(cuCtxPopCurrent_v2, CudaResult, CudaContext*)                   \
  SYMBOL(cuEventCreate, CudaResult, CudaEvent*, unsigned int)            \
  SYMBOL(cuEventRecord, CudaResult, CudaEvent, CudaStream)               \
  SYMBOL(cuEventQuery, CudaResult, CudaEvent)                            \
  SYMBOL(cuEventDestroy_v2, CudaResult, CudaEvent)                       \
  SYMBOL(cuStreamIsCapturing, CudaResult, CudaStream, int*)              \
  SYMBOL(cuStreamWaitEvent, CudaResult, CudaStream, CudaEvent, unsigned) \
  SYMBOL(cuThreadExchangeStreamCaptureMode, CudaResult, int*)            \
  SYMBOL(cuPointerGetAttribute, CudaResult, void*, int, uint64_t)

namespace sparkdl {

#define SPARKDL_DECLARE_POINTER(name, result, ...) result (*name)(__VA_ARGS__) = nullptr;

struct NcclSymbols {
  SPARKDL_NCCL_SYMBOLS(SPARKDL_DECLARE_POINTER)
};

struct CudaSymbols {
  SPARKDL_CUDA_SYMBOLS(SPARKDL_DECLARE_POINTER)
};

#undef SPARKDL_DECLARE_POINTER

}  // namespace sparkdl

#endif  // SPARKDL_NCCL_SYMBOLS_H_
