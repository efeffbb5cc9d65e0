#include "nccl/state.h"

#include <chrono>
#include <cstdio>
#include <utility>

namespace sparkdl {
namespace {

// How soon a failure on the GPU is noticed; each look takes some microseconds.
constexpr std::chrono::milliseconds kLookInterval(20);

// A child that is being split off belongs to a job of its parent, so the end of the parent must be
// awaited.
constexpr std::chrono::seconds kLongestWaitForParent(10);

std::string FormatSeconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g s", seconds);
  return text;
}

void AbandonParent(const std::shared_ptr<NcclState>& parent) {
  std::unique_lock lock(parent->mutex);
  parent->Fail(
      Status(StatusCode::kAborted, "a communicator could not be split off '" + parent->name + "'"));
  parent->changed.wait_for(lock, kLongestWaitForParent, [&] { return parent->ended; });
}

// ncclCommAbort also ends the kernels that wait for peers. It may take a while, so it is called
// without the lock.
void AbortComm(NcclState& state, std::unique_lock<std::mutex>& lock) {
  if (const auto parent = std::exchange(state.parent, nullptr); parent != nullptr) {
    lock.unlock();
    AbandonParent(parent);
    lock.lock();
  }
  NcclComm comm = std::exchange(state.comm, nullptr);
  lock.unlock();
  if (comm != nullptr) state.gpu->library().nccl().ncclCommAbort(comm);
  lock.lock();
  for (const NcclFlight& flight : state.flights) state.spare_events.push_back(flight.event);
  state.flights.clear();
  state.child = nullptr;
  state.ended = true;
  state.changed.notify_all();
}

}  // namespace

std::string Describe(const NcclFlight& flight) {
  std::string text = Describe(flight.operation);
  if (flight.num_more > 0) text += " and " + std::to_string(flight.num_more) + " more";
  return text;
}

NcclState::~NcclState() {
  if (fork != nullptr) gpu->library().cuda().cuEventDestroy_v2(fork);
  for (CudaEvent event : spare_events) gpu->library().cuda().cuEventDestroy_v2(event);
}

void NcclState::Fail(const Status& status) {
  if (failure.ok()) failure = status;
  changed.notify_all();
}

Result<bool> NcclState::IsQuiet() {
  if (!failure.ok()) return failure;
  const NcclLibrary& library = gpu->library();
  NcclResult result = NcclResult::kSuccess;
  const NcclResult asked = library.nccl().ncclCommGetAsyncError(comm, &result);
  Status status = library.Check(asked, "asking NCCL for its state");
  if (status.ok()) status = library.Check(result, "NCCL");
  if (!status.ok()) {
    status = status.Within("NCCL communicator '" + name + "'");
    Fail(status);
    return status;
  }
  if (result == NcclResult::kInProgress) return false;
  child = nullptr;
  return true;
}

void NcclState::LookAtFlights() {
  const NcclLibrary& library = gpu->library();
  while (!flights.empty()) {
    const CudaResult result = library.cuda().cuEventQuery(flights.front().event);
    if (result == CudaResult::kNotReady) break;
    if (result != CudaResult::kSuccess) {
      Fail(library.CheckCuda(result, Describe(flights.front()) + " on '" + name + "'"));
      return;
    }
    spare_events.push_back(flights.front().event);
    flights.pop_front();
  }
  const Clock::time_point now = Clock::now();
  for (const NcclFlight& flight : flights) {
    if (now < flight.deadline) continue;
    if (library.cuda().cuEventQuery(flight.event) == CudaResult::kSuccess) continue;
    Fail(Status(StatusCode::kTimeout,
                Describe(flight) + " on '" + name + "' was not complete on GPU " +
                    std::to_string(gpu->ordinal()) + " within " + FormatSeconds(flight.timeout_s) +
                    ": some rank has not called it, or the streams are still busy with what was "
                    "put on them before"));
    return;
  }
}

Result<CudaEvent> NcclState::TakeEvent() {
  if (!spare_events.empty()) {
    CudaEvent spare = spare_events.back();
    spare_events.pop_back();
    return spare;
  }
  CudaEvent event = nullptr;
  SPARKDL_RETURN_IF_ERROR(gpu->library().CheckCuda(
      gpu->library().cuda().cuEventCreate(&event, kCudaEventDisableTiming), "making an event"));
  return event;
}

void WatchNccl(const std::shared_ptr<NcclState>& state) {
  const Gpu::Current current(*state->gpu);
  // Otherwise querying an event would invalidate a CUDA graph that another thread is capturing.
  int mode = kCudaCaptureModeThreadLocal;
  state->gpu->library().cuda().cuThreadExchangeStreamCaptureMode(&mode);
  std::unique_lock lock(state->mutex);
  while (!state->ended) {
    if (!state->failure.ok()) {
      AbortComm(*state, lock);
    } else if (state->flights.empty()) {
      state->changed.wait(lock);
    } else {
      state->LookAtFlights();
      if (state->failure.ok()) static_cast<void>(state->IsQuiet());
      if (state->failure.ok()) state->changed.wait_for(lock, kLookInterval);
    }
  }
}

}  // namespace sparkdl
