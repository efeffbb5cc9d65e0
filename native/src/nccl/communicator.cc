#include "sparkdl/nccl/communicator.h"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "nccl/state.h"
#include "sparkdl/tcp/fork_guard.h"

namespace sparkdl {
namespace {

// Sleeps that become longer. Most waits take only some microseconds, and even the shortest sleep
// takes more than fifty: until then it lets other threads run.
class Pause {
 public:
  void operator()() {
    if (next_ == kFirst && Clock::now() < spin_until_) {
      std::this_thread::yield();
      return;
    }
    std::this_thread::sleep_for(next_);
    next_ = std::min(2 * next_, kLongest);
  }
  bool is_long() const { return next_ == kLongest; }

 private:
  static constexpr std::chrono::microseconds kFirst{50};
  static constexpr std::chrono::microseconds kLongest{2000};
  std::chrono::microseconds next_ = kFirst;
  const Clock::time_point spin_until_ = Clock::now() + 2 * kFirst;
};

}  // namespace

NcclCommunicator::NcclCommunicator(std::shared_ptr<NcclState> state, NcclOptions options)
    : options_(std::move(options)),
      state_(std::move(state)),
      fork_generation_(ForkGeneration()),
      watch_(std::make_unique<std::thread>([shared = state_] { WatchNccl(shared); })) {}

Result<std::unique_ptr<NcclCommunicator>> NcclCommunicator::Begin(
    const std::shared_ptr<const NcclLibrary>& library, int gpu, const NcclUniqueId& id,
    const NcclOptions& options) {
  auto opened = Gpu::Open(library, gpu);
  SPARKDL_RETURN_IF_ERROR(opened.status());
  const auto state = std::make_shared<NcclState>(opened.value(), options.name);
  const Gpu::Current current(*state->gpu);
  SPARKDL_RETURN_IF_ERROR(current.status());
  // The communicator is created first, because its thread keeps the state alive: NCCL gets the
  // address of the state, which must then outlive it.
  std::unique_ptr<NcclCommunicator> communicator;
  try {
    communicator.reset(new NcclCommunicator(state, options));
  } catch (const std::system_error& error) {
    return Status(StatusCode::kFailed, "cannot start the thread that watches NCCL communicator '" +
                                           options.name + "': " + error.what());
  }
  NcclConfig config;
  SPARKDL_RETURN_IF_ERROR(
      library->Check(library->nccl().ncclCommInitRankConfig(&state->comm, options.world_size, id,
                                                            options.rank, &config),
                     "opening NCCL communicator '" + options.name + "'"));
  return communicator;
}

Result<bool> NcclCommunicator::AwaitQuiet(NcclState& state, Deadline& deadline,
                                          InterruptCheck interrupt_check) {
  for (Pause pause;; pause()) {
    {
      const std::scoped_lock lock(state.mutex);
      auto quiet = state.IsQuiet();
      if (!quiet.ok() || quiet.value()) return quiet;
    }
    if (deadline.Passed()) return false;
    if (pause.is_long() && interrupt_check != nullptr && interrupt_check()) {
      const Status interrupted(StatusCode::kInterrupted,
                               "a signal interrupted a call on '" + state.name + "'");
      const std::scoped_lock lock(state.mutex);
      state.Fail(interrupted);
      return interrupted;
    }
  }
}

Result<bool> NcclCommunicator::WaitReady(double timeout_s, InterruptCheck interrupt_check) {
  Deadline deadline(timeout_s);
  std::shared_ptr<NcclState> parent;
  {
    const std::scoped_lock lock(state_->mutex);
    parent = state_->parent;
  }
  if (parent != nullptr) {
    auto quiet = AwaitQuiet(*parent, deadline, interrupt_check);
    if (!quiet.ok()) {
      Abort(quiet.status());
      return quiet;
    }
    if (!quiet.value()) return false;
    const std::scoped_lock lock(state_->mutex);
    state_->parent = nullptr;
  }
  return AwaitQuiet(*state_, deadline, interrupt_check);
}

Result<std::unique_ptr<NcclCommunicator>> NcclCommunicator::BeginSplit(
    int color, int key, const NcclOptions& options, InterruptCheck interrupt_check) {
  const std::scoped_lock order(order_);
  Deadline deadline(options.timeout_s);
  auto quiet = AwaitQuiet(*state_, deadline, interrupt_check);
  SPARKDL_RETURN_IF_ERROR(quiet.status());
  if (!quiet.value()) {
    return Status(StatusCode::kTimeout, "'" + options_.name + "' is still busy with another call");
  }
  const Gpu::Current current(*state_->gpu);
  SPARKDL_RETURN_IF_ERROR(current.status());
  const auto child = std::make_shared<NcclState>(state_->gpu, options.name);
  const std::scoped_lock lock(state_->mutex);
  SPARKDL_RETURN_IF_ERROR(state_->failure);
  const NcclLibrary& library = state_->gpu->library();
  const Status status =
      library.Check(library.nccl().ncclCommSplit(state_->comm, color, key, &child->comm, nullptr),
                    "splitting '" + options.name + "' off '" + options_.name + "'");
  if (!status.ok()) {
    state_->Fail(status);
    return status;
  }
  // NCCL writes to the child's state until this communicator is quiet.
  state_->child = child;
  if (color == kNcclNoColor) return std::unique_ptr<NcclCommunicator>();
  child->parent = state_;
  return std::unique_ptr<NcclCommunicator>(new NcclCommunicator(child, options));
}

Status NcclCommunicator::Follow(CudaStream stream, CudaStream after) {
  if (stream == after) return {};
  const NcclLibrary& library = state_->gpu->library();
  const CudaSymbols& cuda = library.cuda();
  if (state_->fork == nullptr) {
    auto event = state_->TakeEvent();
    SPARKDL_RETURN_IF_ERROR(event.status());
    state_->fork = event.value();
  }
  SPARKDL_RETURN_IF_ERROR(library.CheckCuda(cuda.cuEventRecord(state_->fork, after),
                                            "recording an event on the stream to follow"));
  return library.CheckCuda(cuda.cuStreamWaitEvent(stream, state_->fork, 0),
                           "making a stream follow another one");
}

Status NcclCommunicator::Join(uint64_t number, CudaStream stream) {
  const Gpu::Current current(*state_->gpu);
  SPARKDL_RETURN_IF_ERROR(current.status());
  const std::scoped_lock lock(state_->mutex);
  SPARKDL_RETURN_IF_ERROR(state_->failure);
  const auto flight = std::find_if(state_->flights.begin(), state_->flights.end(),
                                   [=](const NcclFlight& one) { return one.number == number; });
  if (flight == state_->flights.end()) return {};  // complete
  const NcclLibrary& library = state_->gpu->library();
  return library.CheckCuda(library.cuda().cuStreamWaitEvent(stream, flight->event, 0),
                           "making a stream follow an operation");
}

Result<uint64_t> NcclCommunicator::Run(const std::vector<NcclOperation>& operations,
                                       CudaStream stream, std::optional<CudaStream> after,
                                       double timeout_s, InterruptCheck interrupt_check) {
  if (operations.empty()) {
    return Status(StatusCode::kInvalidArgument, "there must be at least one operation");
  }
  const Gpu::Current current(*state_->gpu);
  SPARKDL_RETURN_IF_ERROR(current.status());
  for (const NcclOperation& operation : operations) SPARKDL_RETURN_IF_ERROR(Validate(operation));
  const std::scoped_lock order(order_);
  Deadline deadline(timeout_s);
  std::vector<int> made;
  // The first wait is for a split that may still be in progress. The second one is for NCCL, which
  // may have to connect the ranks first: until then nothing is on the stream, and an event would be
  // recorded too early.
  for (const bool issue : {true, false}) {
    auto quiet = AwaitQuiet(*state_, deadline, interrupt_check);
    SPARKDL_RETURN_IF_ERROR(quiet.status());
    const std::scoped_lock lock(state_->mutex);
    SPARKDL_RETURN_IF_ERROR(state_->failure);
    Status status;
    if (!quiet.value()) {
      status = Status(StatusCode::kTimeout,
                      Describe(operations.front()) + " on '" + options_.name +
                          "' could not be started within its time: some rank has not called it");
    } else if (issue) {
      if (after.has_value()) status = Follow(stream, *after);
      if (status.ok()) status = Issue(operations, stream, made);
    } else {
      const NcclSymbols& nccl = state_->gpu->library().nccl();
      for (const int reduction : made) nccl.ncclRedOpDestroy(reduction, state_->comm);
    }
    if (!status.ok()) {
      state_->Fail(status);
      return status;
    }
  }
  Result<uint64_t> number = Register(operations, stream, timeout_s);
  if (!number.status().ok()) {
    // The operations are on the stream, and nothing watches them.
    const std::scoped_lock lock(state_->mutex);
    state_->Fail(number.status());
  }
  return number;
}

Result<uint64_t> NcclCommunicator::Register(const std::vector<NcclOperation>& operations,
                                            CudaStream stream, double timeout_s) {
  const std::scoped_lock lock(state_->mutex);
  // Operations that are only captured do not run yet.
  auto capturing = state_->gpu->IsCapturing(stream);
  SPARKDL_RETURN_IF_ERROR(capturing.status());
  if (capturing.value()) return state_->last_number;
  auto event = state_->TakeEvent();
  SPARKDL_RETURN_IF_ERROR(event.status());
  NcclFlight flight;
  flight.event = event.value();
  const NcclLibrary& library = state_->gpu->library();
  const Status recorded = library.CheckCuda(library.cuda().cuEventRecord(flight.event, stream),
                                            "recording an event on the stream");
  if (!recorded.ok()) {
    state_->spare_events.push_back(flight.event);
    return recorded;
  }
  flight.number = ++state_->last_number;
  flight.operation = operations.front();
  flight.num_more = operations.size() - 1;
  flight.timeout_s = timeout_s;
  flight.deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                       std::chrono::duration<double>(std::min(timeout_s, 1e8)));
  state_->flights.push_back(std::move(flight));
  // With more flights the watching thread is awake, and looks at all of them.
  if (state_->flights.size() == 1) state_->changed.notify_all();
  return state_->last_number;
}

Result<bool> NcclCommunicator::IsDone(uint64_t number) {
  const std::scoped_lock lock(state_->mutex);
  if (state_->failure.ok()) state_->LookAtFlights();
  const auto& flights = state_->flights;
  if (!state_->failure.ok()) return state_->failure;
  return flights.empty() || flights.front().number > number;
}

Status NcclCommunicator::Wait(uint64_t number, double timeout_s, InterruptCheck interrupt_check) {
  Deadline deadline(timeout_s);
  for (Pause pause;; pause()) {
    const Gpu::Current current(*state_->gpu);
    auto done = IsDone(number);
    SPARKDL_RETURN_IF_ERROR(done.status());
    if (done.value()) return {};
    if (deadline.Passed()) {
      return Status(StatusCode::kTimeout,
                    "call " + std::to_string(number) + " on '" + options_.name +
                        "' is not complete yet; it continues and can be waited for again");
    }
    if (pause.is_long() && interrupt_check != nullptr && interrupt_check()) {
      return Status(StatusCode::kInterrupted, "a signal interrupted the wait");
    }
  }
}

bool NcclCommunicator::busy() const {
  const std::scoped_lock lock(state_->mutex);
  return !state_->flights.empty();
}

void NcclCommunicator::Abort(const Status& reason) {
  const std::scoped_lock lock(state_->mutex);
  state_->Fail(reason);
}

std::optional<std::string> NcclCommunicator::failure() const {
  const std::scoped_lock lock(state_->mutex);
  if (state_->failure.ok() || state_->left) return std::nullopt;
  return state_->failure.ToString();
}

}  // namespace sparkdl
