// Opening and closing of communicators.
#include <sys/eventfd.h>

#include <array>
#include <cerrno>
#include <new>
#include <system_error>
#include <utility>

#include "sparkdl/communicator.h"
#include "sparkdl/deadline.h"
#include "sparkdl/tcp/fork_guard.h"
#include "sparkdl/tcp/socket.h"

namespace sparkdl {
namespace {

Status Invalid(const std::string& text) { return Status(StatusCode::kInvalidArgument, text); }

Status CheckPositive(const char* name, double seconds) {
  if (seconds > 0) return {};
  return Invalid(std::string(name) + " must be positive, got " + std::to_string(seconds));
}

// Checks that a pair of sockets is given exactly if it is needed.
Status CheckPair(const char* what, int first_fd, int second_fd, bool is_needed) {
  const bool is_there = first_fd >= 0 && second_fd >= 0;
  const bool is_absent = first_fd == -1 && second_fd == -1;
  if (is_needed ? is_there : is_absent) return {};
  return Invalid(
      std::string(what) + (is_needed ? " must be two connected sockets" : " must be (-1, -1)") +
      " for this rank, got (" + std::to_string(first_fd) + ", " + std::to_string(second_fd) + ")");
}

std::optional<Ring> MakeRing(const Topology& topology, const CommunicatorOptions& options) {
  if (!topology.owns_lane()) return std::nullopt;
  std::vector<int> ranks;
  for (int host = 0; host < topology.num_hosts(); ++host) {
    ranks.push_back(topology.ranks_on(host)[topology.local_rank()]);
  }
  return Ring(DuplexStream(GuardedSocket(options.lane_to_next_fd),
                           GuardedSocket(options.lane_from_previous_fd), topology.next_on_lane(),
                           topology.previous_on_lane()),
              topology.host(), std::move(ranks));
}

Status Prepare(const Topology& topology, const CommunicatorOptions& options) {
  if (options.wire != Dtype::kFloat32 && WireFormat::Find(options.wire) == nullptr) {
    return Invalid("float32 cannot travel as " + std::string(NameOf(options.wire)));
  }
  SPARKDL_RETURN_IF_ERROR(CheckPositive("timeout_s", options.timeout_s));
  SPARKDL_RETURN_IF_ERROR(CheckPositive("stall_warning_s", options.stalls.warn_after_s));
  SPARKDL_RETURN_IF_ERROR(CheckPositive("stall_abort_s", options.stalls.abort_after_s));
  const bool needs_segment = topology.local_size() > 1;
  if (options.segment == nullptr && (options.segment_fd >= 0) != needs_segment) {
    return Invalid(std::string("segment_fd must be ") +
                   (needs_segment ? "a file descriptor, because " : "-1, because ") +
                   std::to_string(topology.local_size()) + " ranks are on this host; got " +
                   std::to_string(options.segment_fd));
  }
  SPARKDL_RETURN_IF_ERROR(CheckPair("lane_fds", options.lane_to_next_fd,
                                    options.lane_from_previous_fd, topology.owns_lane()));
  SPARKDL_RETURN_IF_ERROR(CheckPair("lifeline_fds", options.lifeline_to_next_fd,
                                    options.lifeline_from_previous_fd, topology.world_size() > 1));
  if (topology.owns_lane()) {
    SPARKDL_RETURN_IF_ERROR(PrepareSocket(options.lane_to_next_fd, "lane_fds[0]"));
    SPARKDL_RETURN_IF_ERROR(PrepareSocket(options.lane_from_previous_fd, "lane_fds[1]"));
  }
  if (topology.world_size() > 1) {
    SPARKDL_RETURN_IF_ERROR(PrepareSocket(options.lifeline_to_next_fd, "lifeline_fds[0]"));
    SPARKDL_RETURN_IF_ERROR(PrepareSocket(options.lifeline_from_previous_fd, "lifeline_fds[1]"));
    SPARKDL_RETURN_IF_ERROR(WatchPeer(options.lifeline_to_next_fd, "lifeline_fds[0]"));
    SPARKDL_RETURN_IF_ERROR(WatchPeer(options.lifeline_from_previous_fd, "lifeline_fds[1]"));
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<Communicator>> Communicator::Open(const CommunicatorOptions& options) {
  // The mapping keeps the segment's memory, so the descriptor is closed in any case.
  const UniqueFd segment_fd(options.segment_fd);
  std::array<UniqueFd, 4> sockets{
      UniqueFd(options.lane_to_next_fd), UniqueFd(options.lane_from_previous_fd),
      UniqueFd(options.lifeline_to_next_fd), UniqueFd(options.lifeline_from_previous_fd)};
  auto topology = Topology::Make(options.rank, options.host_of_rank);
  if (!topology.ok()) return topology.status();
  SPARKDL_RETURN_IF_ERROR(Prepare(topology.value(), options));
  std::shared_ptr<Segment> segment = options.segment;
  if (segment == nullptr && options.segment_fd >= 0) {
    auto attached = Segment::Attach(options.segment_fd, topology.value().local_size());
    if (!attached.ok()) return attached.status();
    segment = std::move(attached).value();
  }
  UniqueFd wake_fd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!wake_fd.valid()) return Status::FromErrno("cannot make an eventfd", errno);

  std::unique_ptr<Communicator> communicator(
      new Communicator(std::move(topology).value(), options, std::move(segment)));
  for (UniqueFd& socket : sockets) static_cast<void>(socket.Release());  // it owns them now
  communicator->wake_fd_ = std::move(wake_fd);
  try {
    communicator->progress_thread_ =
        std::thread([self = communicator.get()] { self->ProgressLoop(); });
  } catch (const std::system_error& error) {
    return Status(StatusCode::kFailed,
                  std::string("cannot start the progress thread: ") + error.what());
  }
  return communicator;
}

Communicator::Communicator(Topology topology, const CommunicatorOptions& options,
                           std::shared_ptr<Segment> segment)
    : topology_(std::move(topology)),
      timeout_s_(options.timeout_s),
      monitor_(std::make_shared<OperationMonitor>(topology_.world_size(), topology_.num_hosts() > 1,
                                                  options.stalls)),
      lifeline_(topology_.rank(), topology_.world_size(),
                GuardedSocket(options.lifeline_to_next_fd),
                GuardedSocket(options.lifeline_from_previous_fd), failure_),
      collectives_(topology_, std::move(segment), MakeRing(topology_, options), options.wire) {}

Communicator::~Communicator() {
  if (ForkGeneration() != fork_generation_) {
    // The thread does not exist in the forked child, where it can neither be joined nor detached.
    static_cast<void>(new (std::nothrow) std::thread(std::move(progress_thread_)));
    return;
  }
  const std::scoped_lock lock(close_mutex_);
  if (is_closed_) return;
  is_closing_ = true;
  if (num_pending_ != 0) {
    Abort("the communicator was dropped with operations still queued");
  }
  Shutdown();
}

Status Communicator::Close(InterruptCheck interrupt_check) {
  SPARKDL_RETURN_IF_ERROR(CheckProcess());
  const std::scoped_lock lock(close_mutex_);
  if (is_closed_) return {};
  {
    // Under the queue's lock, so that no operation is queued after it is set.
    const std::scoped_lock queue_lock(queue_mutex_);
    is_closing_ = true;
  }
  Status status = DrainQueue(interrupt_check);
  Shutdown();
  return status;
}

// Keeps the turn, so that no operation can begin afterwards.
Status Communicator::DrainQueue(InterruptCheck interrupt_check) {
  constexpr std::chrono::milliseconds kSlice{10};
  Deadline deadline(timeout_s_);
  Status status;
  while (num_pending_.load(std::memory_order_acquire) != 0 || !TryAcquireTurn()) {
    std::shared_ptr<PendingOperation> last;
    {
      const std::scoped_lock lock(queue_mutex_);
      if (!queue_.empty()) last = queue_.back();
    }
    if (last != nullptr) {
      last->WaitFor(kSlice);
    } else {
      std::this_thread::sleep_for(kSlice);  // until another thread's operation ends
    }
    if (!status.ok()) continue;
    if (deadline.Passed()) {
      status = Fail(Status(StatusCode::kTimeout, "close waited " + std::to_string(timeout_s_) +
                                                     " s for queued operations"));
    } else if (interrupt_check != nullptr && interrupt_check()) {
      status = Fail(Status(StatusCode::kInterrupted, "a signal interrupted close"));
    }
  }
  return status;
}

void Communicator::Shutdown() {
  stops_ = true;
  WakeProgressThread();
  if (progress_thread_.joinable()) progress_thread_.join();
  lifeline_.Goodbye(next_sequence_);
  collectives_.Release();
  is_closed_ = true;
}

}  // namespace sparkdl
