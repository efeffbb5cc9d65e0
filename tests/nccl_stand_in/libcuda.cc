// A stand-in for the CUDA driver, for tests on machines without a GPU. The memory of its GPUs is
// memory of this process; a stream is a thread that runs the work put on it in order,
// asynchronously to the caller.
//
// CUDA_VISIBLE_DEVICES=3,1 shows the GPUs 3 and 1 of eight. With CUDA_STAND_IN_ALL_MEMORY=1 all
// memory counts as memory of the current GPU; otherwise only memory from cuMemAlloc_v2 does.
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kInvalidDevice = 101, kInvalidContext = 201,
              kNotReady = 600;

struct Stream {
  Stream() : thread([this] { Run(); }) { thread.detach(); }

  void Put(std::function<void()> task) {
    const std::scoped_lock lock(mutex);
    tasks.push_back(std::move(task));
    changed.notify_one();
  }

  void Run() {
    while (true) {
      std::unique_lock lock(mutex);
      changed.wait(lock, [this] { return !tasks.empty(); });
      const auto task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      task();
    }
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  std::atomic<int> capturing{0};
  std::thread thread;
};

struct Event {
  std::atomic<uint64_t> recorded{0};
  std::atomic<uint64_t> reached{0};
};

struct Context {
  int device = 0;
};

std::vector<int> VisibleDevices() {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) return {0, 1, 2, 3, 4, 5, 6, 7};
  std::vector<int> devices;
  std::stringstream text(visible);
  for (std::string one; std::getline(text, one, ',');) devices.push_back(std::atoi(one.c_str()));
  return devices;
}

// Initial-exec: glibc frees the thread-local memory of a library opened late at a point where
// ThreadSanitizer does not see that the thread has ended.
[[gnu::tls_model("initial-exec")]] thread_local std::vector<Context*> current;

// The default stream is that of the current context.
Stream* StreamOf(void* stream) {
  if (stream != nullptr) return static_cast<Stream*>(stream);
  static std::mutex mutex;
  static std::map<Context*, Stream*> defaults;
  const std::scoped_lock lock(mutex);
  Stream*& found = defaults[current.empty() ? nullptr : current.back()];
  if (found == nullptr) found = new Stream;
  return found;
}

std::mutex memory_mutex;
std::map<uint64_t, std::pair<size_t, int>> memory;  // begin: size, device

}  // namespace

extern "C" {

int cuInit(unsigned int) { return kSuccess; }

int cuGetErrorName(int result, const char** name) {
  *name = result == kInvalidContext ? "CUDA_ERROR_INVALID_CONTEXT" : "CUDA_ERROR_OF_THE_STAND_IN";
  return kSuccess;
}

int cuGetErrorString(int, const char** text) {
  *text = "an error of the stand-in";
  return kSuccess;
}

int cuDeviceGetCount(int* count) {
  *count = static_cast<int>(VisibleDevices().size());
  return kSuccess;
}

int cuDeviceGet(int* device, int ordinal) {
  const auto visible = VisibleDevices();
  if (ordinal < 0 || ordinal >= static_cast<int>(visible.size())) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

int cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
  std::memset(uuid, 0xab, 16);
  uuid[15] = static_cast<unsigned char>(VisibleDevices().at(device));
  return kSuccess;
}

int cuDeviceGetPCIBusId(char* text, int size, int device) {
  std::snprintf(text, size, "0000:%02x:00.0", 16 + VisibleDevices().at(device));
  return kSuccess;
}

int cuDevicePrimaryCtxRetain(Context** context, int device) {
  static auto contexts = [] {
    std::array<Context, 64> made;
    for (size_t i = 0; i < made.size(); ++i) made[i].device = static_cast<int>(i);
    return made;
  }();
  *context = &contexts.at(device);
  return kSuccess;
}

int cuDevicePrimaryCtxRelease_v2(int) { return kSuccess; }

int cuCtxPushCurrent_v2(Context* context) {
  current.push_back(context);
  return kSuccess;
}

int cuCtxPopCurrent_v2(Context** context) {
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  current.pop_back();
  return kSuccess;
}

int cuCtxGetDevice(int* device) {
  if (current.empty()) return kInvalidContext;
  *device = current.back()->device;
  return kSuccess;
}

int cuStreamCreate(void** stream, unsigned int) {
  *stream = new Stream;
  return kSuccess;
}

int cuStreamIsCapturing(void* stream, int* capturing) {
  *capturing = StreamOf(stream)->capturing;
  return kSuccess;
}

// Implements only the part of capturing that the query above shows.
int cuStreamBeginCapture_v2(void* stream, int) {
  StreamOf(stream)->capturing = 1;
  return kSuccess;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  *mode = 0;
  return kSuccess;
}

int cuLaunchHostFunc(void* stream, void (*function)(void*), void* argument) {
  StreamOf(stream)->Put([=] { function(argument); });
  return kSuccess;
}

int cuEventCreate(Event** event, unsigned int) {
  if (current.empty()) return kInvalidContext;
  static auto* const all = new std::vector<Event*>;
  static std::mutex mutex;
  const std::scoped_lock lock(mutex);
  *event = all->emplace_back(new Event);
  return kSuccess;
}

int cuEventRecord(Event* event, void* stream) {
  const uint64_t number = ++event->recorded;
  StreamOf(stream)->Put([=] { event->reached = number; });
  return kSuccess;
}

int cuStreamWaitEvent(void* stream, Event* event, unsigned int) {
  const uint64_t number = event->recorded;
  StreamOf(stream)->Put([=] {
    while (event->reached < number) std::this_thread::sleep_for(std::chrono::microseconds(50));
  });
  return kSuccess;
}

int cuEventQuery(Event* event) { return event->reached == event->recorded ? kSuccess : kNotReady; }

// Not freed, because a stream may not have reached it yet.
int cuEventDestroy_v2(Event*) { return kSuccess; }

int cuMemAlloc_v2(uint64_t* pointer, size_t bytes) {
  int device = 0;
  if (const int result = cuCtxGetDevice(&device); result != kSuccess) return result;
  *pointer = reinterpret_cast<uint64_t>(std::calloc(1, bytes));
  const std::scoped_lock lock(memory_mutex);
  memory[*pointer] = {bytes, device};
  return kSuccess;
}

int cuPointerGetAttribute(void* value, int attribute, uint64_t pointer) {
  constexpr int kDeviceOrdinal = 9;
  if (attribute != kDeviceOrdinal) return kInvalidValue;
  const std::scoped_lock lock(memory_mutex);
  auto after = memory.upper_bound(pointer);
  if (after != memory.begin()) {
    const auto& [begin, block] = *--after;
    if (pointer < begin + block.first) {
      std::memcpy(value, &block.second, sizeof(int));
      return kSuccess;
    }
  }
  if (std::getenv("CUDA_STAND_IN_ALL_MEMORY") == nullptr) return kInvalidValue;
  return cuCtxGetDevice(static_cast<int*>(value));
}

}  // extern "C"
