// A stand-in for NCCL, for tests on machines without a GPU: the functions that sparkdl calls. Ranks
// exchange data by files in the folder NCCL_STAND_IN_FOLDER, on the streams of the stand-in for
// CUDA.
//
// NCCL_STAND_IN makes it misbehave; it is read at every call, as words separated by spaces.
// version=21500: result of ncclGetVersion. fail=NAME:RESULT: the function NAME returns RESULT, with
// NCCL_STAND_IN_LAST_ERROR as the last error. state=RESULT: result of ncclCommGetAsyncError for
// open communicators. open=RESULT: opening ends with RESULT. open=never: opening does not end.
// launch=now: a call puts its operations on the stream before it returns, with no thread between.
//
// Every call appends its name to the file NCCL_STAND_IN_CALLS-PID, if that variable is set.
#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>

#include "comm.h"
#include "elements.h"
#include "operation.h"

using stand_in::Comm;
using stand_in::Operation;

extern "C" {
int cuCtxGetDevice(int* device);
int cuCtxPushCurrent_v2(void* context);
int cuDevicePrimaryCtxRetain(void** context, int device);
int cuDeviceGetUuid_v2(unsigned char* uuid, int device);
int cuLaunchHostFunc(void* stream, void (*function)(void*), void* argument);
}

namespace {

std::mutex mutex;
std::string last_error;
std::map<int, double> factors;  // of the reductions that ncclRedOpCreatePreMulSum made

// Initial-exec: see libcuda.cc.
[[gnu::tls_model("initial-exec")]] thread_local int group_depth = 0;
[[gnu::tls_model("initial-exec")]] thread_local std::vector<Operation> group;
[[gnu::tls_model("initial-exec")]] thread_local std::string told_error;

std::optional<std::string> Told(const std::string& what) {
  const char* text = std::getenv("NCCL_STAND_IN");
  std::stringstream words(text == nullptr ? "" : text);
  for (std::string word; words >> word;) {
    if (word.rfind(what + "=", 0) == 0) return word.substr(what.size() + 1);
  }
  return std::nullopt;
}

int Fail(int result, const std::string& error) {
  const std::scoped_lock lock(mutex);
  last_error = error;
  return result;
}

// The result of a call that NCCL_STAND_IN makes fail; otherwise success.
int Begin(const std::string& name, const Comm* comm = nullptr) {
  if (const char* path = std::getenv("NCCL_STAND_IN_CALLS"); path != nullptr) {
    const std::string file = std::string(path) + "-" + std::to_string(getpid());
    const int fd = open(file.c_str(), O_WRONLY | O_APPEND | O_CREAT, 0600);
    const std::string line = name + "\n";
    if (write(fd, line.data(), line.size()) < 0) std::abort();
    close(fd);
  }
  if (comm != nullptr && comm->over)
    return Fail(stand_in::kInvalidArgument, "corrupted comm object detected");
  const auto told = Told("fail");
  if (!told.has_value() || told->rfind(name + ":", 0) != 0) return stand_in::kSuccess;
  const char* error = std::getenv("NCCL_STAND_IN_LAST_ERROR");
  return Fail(std::atoi(told->substr(name.size() + 1).c_str()), error == nullptr ? "" : error);
}

void RunOnStream(void* argument) {
  const auto* operations = static_cast<std::vector<Operation>*>(argument);
  Comm& comm = *operations->front().comm;
  // A group is one kernel that runs all operations at once: no send waits for a recv.
  for (const bool sends : {true, false}) {
    for (const Operation& o : *operations) {
      if ((o.kind == "ncclSend") == sends && !comm.aborted) RunOne(o);
    }
  }
  for (const Operation& o : *operations) {
    if (o.kind == "ncclSend" && !comm.aborted) AwaitReceived(o);
  }
  comm.num_running -= 1;
  delete operations;
}

// On a separate thread, as NCCL does for non-blocking communicators.
void Launch(std::vector<Operation> operations) {
  Comm* comm = operations.front().comm;
  comm->num_running += 1;
  if (Told("launch") == "now") {
    void* stream = operations.front().stream;
    cuLaunchHostFunc(stream, &RunOnStream, new std::vector<Operation>(std::move(operations)));
    return;
  }
  comm->state = stand_in::kInProgress;
  std::thread([comm, operations = std::move(operations)]() mutable {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    void* context = nullptr;
    cuDevicePrimaryCtxRetain(&context, comm->device);
    cuCtxPushCurrent_v2(context);
    void* stream = operations.front().stream;
    cuLaunchHostFunc(stream, &RunOnStream, new std::vector<Operation>(std::move(operations)));
    comm->state = stand_in::kSuccess;
  }).detach();
}

int Start(Operation operation) {
  if (const int result = Begin(operation.kind, operation.comm); result != stand_in::kSuccess)
    return result;
  if (operation.comm->state == stand_in::kInProgress) {
    return Fail(stand_in::kInvalidArgument,
                "Attempt to use communicator before the previous operation returned");
  }
  if (operation.reduction >= stand_in::kFirstOfOwn) {
    const std::scoped_lock lock(mutex);
    operation.factor = factors.at(operation.reduction);
    operation.reduction = stand_in::kSum;
  }
  if (group_depth > 0) {
    group.push_back(operation);
    return stand_in::kSuccess;
  }
  Launch({operation});
  return stand_in::kInProgress;
}

// Keeps a communicator until the process ends.
Comm* Keep(std::unique_ptr<Comm> comm) {
  comm->num_sent.assign(comm->num_ranks, 0);
  comm->num_received.assign(comm->num_ranks, 0);
  static auto* const all = new std::vector<std::unique_ptr<Comm>>;
  const std::scoped_lock lock(mutex);
  return all->emplace_back(std::move(comm)).get();
}

void Open(Comm* comm) {
  if (Told("open") == "never") {
    comm->AwaitAbort();
    comm->state = stand_in::kInternal;
    return;
  }
  unsigned char uuid[16];
  cuDeviceGetUuid_v2(uuid, comm->device);
  const auto uuids =
      comm->Exchange("open", std::string(reinterpret_cast<char*>(uuid), sizeof(uuid)));
  const auto told = Told("open");
  if (!uuids.has_value()) {
    comm->state = stand_in::kInternal;
  } else if (told.has_value()) {
    const char* error = std::getenv("NCCL_STAND_IN_LAST_ERROR");
    comm->state = Fail(std::atoi(told->c_str()), error == nullptr ? "" : error);
  } else {
    for (int a = 0; a < comm->num_ranks; ++a) {
      for (int b = a + 1; b < comm->num_ranks; ++b) {
        if ((*uuids)[a] != (*uuids)[b]) continue;
        comm->state = Fail(stand_in::kInvalidUsage,
                           "Duplicate GPU detected : rank " + std::to_string(a) + " and rank " +
                               std::to_string(b) + " both on CUDA device 1000");
        return;
      }
    }
    comm->state = stand_in::kSuccess;
  }
}

void Split(Comm* parent, int number, int color, int key, Comm** made) {
  const std::string name = "split." + std::to_string(number);
  const auto told = parent->Exchange(name, std::to_string(color) + " " + std::to_string(key));
  if (!told.has_value()) {
    parent->state = stand_in::kInternal;
    return;
  }
  std::vector<std::pair<int, int>> members;  // key, rank in the parent
  for (int rank = 0; rank < parent->num_ranks; ++rank) {
    std::stringstream text((*told)[rank]);
    int its_color = 0, its_key = 0;
    text >> its_color >> its_key;
    if (its_color == color) members.emplace_back(its_key, rank);
  }
  std::sort(members.begin(), members.end());
  if (color >= 0) {
    auto child = std::make_unique<Comm>();
    child->folder = parent->folder / ("child of " + name + "." + std::to_string(color));
    std::filesystem::create_directories(child->folder);
    child->num_ranks = static_cast<int>(members.size());
    for (int rank = 0; rank < child->num_ranks; ++rank) {
      if (members[rank].second == parent->rank) child->rank = rank;
    }
    child->device = parent->device;
    *made = Keep(std::move(child));
  }
  parent->state = stand_in::kSuccess;
}

}  // namespace

extern "C" {

struct UniqueId {
  char bytes[128];
};

struct Config {
  size_t size;
  unsigned int magic;
  unsigned int version;
  int blocking;
};

int ncclGetVersion(int* version) {
  *version = std::atoi(Told("version").value_or("22706").c_str());
  return Begin("ncclGetVersion");
}

const char* ncclGetErrorString(int result) {
  constexpr const char* kTexts[] = {
      "no error",
      "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
      "unhandled system error (run with NCCL_DEBUG=INFO for details)",
      "internal error - please report this issue to the NCCL developers",
      "invalid argument (run with NCCL_DEBUG=WARN for details)",
      "invalid usage (run with NCCL_DEBUG=WARN for details)",
      "remote process exited or there was a network error",
      "NCCL operation in progress"};
  return kTexts[result];
}

const char* ncclGetLastError(Comm*) {
  const std::scoped_lock lock(mutex);
  told_error = last_error;
  return told_error.c_str();
}

int ncclGetUniqueId(UniqueId* id) {
  std::random_device random;
  std::snprintf(id->bytes, sizeof(id->bytes), "%08x%08x", random(), random());
  return Begin("ncclGetUniqueId");
}

int ncclCommInitRankConfig(Comm** comm, int num_ranks, UniqueId id, int rank, Config* config) {
  if (const int result = Begin("ncclCommInitRankConfig"); result != stand_in::kSuccess)
    return result;
  if (config->magic != 0xcafebeef || config->size < sizeof(Config) || config->version < 21400) {
    return Fail(stand_in::kInvalidArgument,
                "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
  }
  if (config->blocking != 0)
    return Fail(stand_in::kInvalidArgument, "the stand-in only opens without blocking");
  auto made = std::make_unique<Comm>();
  if (cuCtxGetDevice(&made->device) != 0)
    return Fail(stand_in::kUnhandledCuda, "no GPU is current");
  made->folder = std::filesystem::path(std::getenv("NCCL_STAND_IN_FOLDER")) / id.bytes;
  std::filesystem::create_directories(made->folder);
  made->rank = rank;
  made->num_ranks = num_ranks;
  made->state = stand_in::kInProgress;
  *comm = Keep(std::move(made));
  std::thread(&Open, *comm).detach();
  return stand_in::kInProgress;
}

#ifndef NCCL_STAND_IN_WITHOUT_SPLIT
int ncclCommSplit(Comm* comm, int color, int key, Comm** made, Config*) {
  if (const int result = Begin("ncclCommSplit", comm); result != stand_in::kSuccess) return result;
  *made = nullptr;
  comm->state = stand_in::kInProgress;
  std::thread(&Split, comm, comm->num_splits++, color, key, made).detach();
  return stand_in::kInProgress;
}
#endif

int ncclCommGetAsyncError(Comm* comm, int* state) {
  if (comm == nullptr || comm->over)
    return Fail(stand_in::kInvalidArgument, "corrupted comm object detected");
  *state = comm->state;
  const auto told = Told("state");
  if (*state == stand_in::kSuccess && told.has_value()) {
    const char* error = std::getenv("NCCL_STAND_IN_LAST_ERROR");
    *state = Fail(std::atoi(told->c_str()), error == nullptr ? "" : error);
  }
  return stand_in::kSuccess;
}

int ncclCommFinalize(Comm* comm) {
  if (const int result = Begin("ncclCommFinalize", comm); result != stand_in::kSuccess)
    return result;
  comm->state = stand_in::kInProgress;
  std::thread([comm] {
    while (comm->num_running > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    comm->state = stand_in::kSuccess;
  }).detach();
  return stand_in::kInProgress;
}

int ncclCommDestroy(Comm* comm) {
  const int result = Begin("ncclCommDestroy", comm);
  comm->over = true;
  return result;
}

int ncclCommAbort(Comm* comm) {
  const int result = Begin("ncclCommAbort", comm);
  comm->aborted = true;
  while (comm->num_running > 0 || comm->state == stand_in::kInProgress) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  comm->over = true;
  return result;
}

int ncclGroupStart() {
  group_depth += 1;
  return Begin("ncclGroupStart");
}

int ncclGroupEnd() {
  group_depth -= 1;
  std::vector<Operation> operations;
  operations.swap(group);
  if (const int result = Begin("ncclGroupEnd"); result != stand_in::kSuccess) return result;
  if (operations.empty()) return stand_in::kSuccess;
  Launch(std::move(operations));
  return stand_in::kInProgress;
}

int ncclAllReduce(const char* input, char* output, size_t count, int type, int reduction,
                  Comm* comm, void* stream) {
  return Start({"ncclAllReduce", input, output, count, type, reduction, 0, {}, comm, stream});
}

int ncclReduceScatter(const char* input, char* output, size_t count, int type, int reduction,
                      Comm* comm, void* stream) {
  return Start({"ncclReduceScatter", input, output, count, type, reduction, 0, {}, comm, stream});
}

int ncclReduce(const char* input, char* output, size_t count, int type, int reduction, int root,
               Comm* comm, void* stream) {
  return Start({"ncclReduce", input, output, count, type, reduction, root, {}, comm, stream});
}

int ncclAllGather(const char* input, char* output, size_t count, int type, Comm* comm,
                  void* stream) {
  return Start({"ncclAllGather", input, output, count, type, 0, 0, {}, comm, stream});
}

int ncclBroadcast(const char* input, char* output, size_t count, int type, int root, Comm* comm,
                  void* stream) {
  return Start({"ncclBroadcast", input, output, count, type, 0, root, {}, comm, stream});
}

int ncclSend(const char* input, size_t count, int type, int to, Comm* comm, void* stream) {
  return Start({"ncclSend", input, nullptr, count, type, 0, to, {}, comm, stream});
}

int ncclRecv(char* output, size_t count, int type, int from, Comm* comm, void* stream) {
  return Start({"ncclRecv", nullptr, output, count, type, 0, from, {}, comm, stream});
}

int ncclRedOpCreatePreMulSum(int* reduction, void* factor, int type, int, Comm* comm) {
  if (const int result = Begin("ncclRedOpCreatePreMulSum", comm); result != stand_in::kSuccess)
    return result;
  const std::scoped_lock lock(mutex);
  *reduction = stand_in::kFirstOfOwn;
  while (factors.count(*reduction) > 0) *reduction += 1;
  factors[*reduction] = stand_in::Load(type, static_cast<const char*>(factor));
  return stand_in::kSuccess;
}

int ncclRedOpDestroy(int reduction, Comm* comm) {
  const int result = Begin("ncclRedOpDestroy", comm);
  const std::scoped_lock lock(mutex);
  factors.erase(reduction);
  return result;
}

}  // extern "C"
