// Closing of NCCL communicators.
#include <chrono>
#include <utility>

#include "nccl/state.h"
#include "sparkdl/nccl/communicator.h"
#include "sparkdl/tcp/fork_guard.h"

namespace sparkdl {
namespace {

// ncclCommAbort tells the kernels to stop and waits for them.
constexpr std::chrono::milliseconds kLongestAbort(5000);
constexpr std::chrono::milliseconds kLongestDrop(1000);

}  // namespace

NcclCommunicator::~NcclCommunicator() {
  if (ForkGeneration() != fork_generation_) {
    // A forked child has neither the thread nor a usable GPU. The thread's reference to the state
    // is never released, so the state remains.
    [[maybe_unused]] const std::thread* elsewhere = watch_.release();
    return;
  }
  Abort(Status(StatusCode::kAborted, "'" + options_.name + "' was dropped without being closed"));
  EndWatch(kLongestDrop);
}

Status NcclCommunicator::Close(InterruptCheck interrupt_check) {
  const std::scoped_lock order(order_);
  if (std::exchange(closed_, true)) return {};
  Deadline deadline(options_.timeout_s);
  Status status;
  if (!failure().has_value()) status = Finish(deadline, interrupt_check);
  if (!status.ok()) Abort(status);
  EndWatch(kLongestAbort);
  return status;
}

Status NcclCommunicator::Finish(Deadline& deadline, InterruptCheck interrupt_check) {
  uint64_t last = 0;
  {
    const std::scoped_lock lock(state_->mutex);
    last = state_->last_number;
  }
  const std::string what = "closing '" + options_.name + "'";
  const double left_s = std::chrono::duration<double>(deadline.Left()).count();
  SPARKDL_RETURN_IF_ERROR(Wait(last, left_s, interrupt_check).Within(what));
  const Gpu::Current current(*state_->gpu);
  SPARKDL_RETURN_IF_ERROR(current.status());
  const NcclLibrary& library = state_->gpu->library();
  for (const bool finalize : {true, false}) {
    auto quiet = AwaitQuiet(*state_, deadline, interrupt_check);
    SPARKDL_RETURN_IF_ERROR(quiet.status());
    if (!quiet.value()) {
      return Status(StatusCode::kTimeout, what +
                                              " waited in vain for the other ranks, or for CUDA "
                                              "graphs that hold operations of it: reset "
                                              "graphs before");
    }
    if (!finalize) break;
    const std::scoped_lock lock(state_->mutex);
    SPARKDL_RETURN_IF_ERROR(state_->failure);
    SPARKDL_RETURN_IF_ERROR(library.Check(library.nccl().ncclCommFinalize(state_->comm), what));
  }
  NcclComm comm = nullptr;
  {
    const std::scoped_lock lock(state_->mutex);
    SPARKDL_RETURN_IF_ERROR(state_->failure);
    comm = std::exchange(state_->comm, nullptr);
    // From here on there is nothing that the watching thread could abort.
    state_->ended = true;
    state_->left = true;
    state_->Fail(Status(StatusCode::kFailed, "'" + options_.name + "' is closed"));
  }
  return library.Check(library.nccl().ncclCommDestroy(comm), what);
}

void NcclCommunicator::EndWatch(std::chrono::milliseconds longest) {
  if (watch_ == nullptr) return;
  bool ended = false;
  {
    std::unique_lock lock(state_->mutex);
    ended = state_->changed.wait_for(lock, longest, [&] { return state_->ended; });
  }
  // A thread that hangs in ncclCommAbort has all the data it needs and is detached.
  if (ended) {
    watch_->join();
  } else {
    watch_->detach();
  }
  watch_ = nullptr;
}

}  // namespace sparkdl
