#include "bindings/communicator_class.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/errors.h"
#include "bindings/handle_class.h"
#include "bindings/monitor_class.h"
#include "bindings/request.h"
#include "bindings/signals.h"
#include "bindings/text.h"
#include "sparkdl/communicator.h"

namespace sparkdl::bindings {
namespace {

using Timeout = std::optional<double>;

Status ReadWire(std::string_view name, Dtype& wire) {
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16}) {
    if (name != NameOf(dtype)) continue;
    wire = dtype;
    return {};
  }
  return Status(StatusCode::kInvalidArgument,
                "wire must be 'float32', 'bfloat16' or 'float16', got '" + std::string(name) + "'");
}

class CommunicatorObject {
 public:
  CommunicatorObject(int rank, const std::vector<int>& host_of_rank, int segment_fd,
                     std::pair<int, int> lane_fds, std::pair<int, int> lifeline_fds,
                     double timeout_s, std::string_view wire, Timeout stall_warning_s,
                     Timeout stall_abort_s, int stall_fd) {
    CommunicatorOptions options;
    RaiseIfError(ReadWire(wire, options.wire));
    options.rank = rank;
    options.host_of_rank = host_of_rank;
    options.segment_fd = segment_fd;
    options.lane_to_next_fd = lane_fds.first;
    options.lane_from_previous_fd = lane_fds.second;
    options.lifeline_to_next_fd = lifeline_fds.first;
    options.lifeline_from_previous_fd = lifeline_fds.second;
    options.timeout_s = timeout_s;
    options.stalls = {.warn_after_s = stall_warning_s.value_or(StallOptions::kNever),
                      .abort_after_s = stall_abort_s.value_or(StallOptions::kNever),
                      .notice_fd = stall_fd};
    auto opened = Communicator::Open(options);
    RaiseIfError(opened.status());
    core_ = std::move(opened).value();
  }

  int rank() const { return core_->rank(); }
  int world_size() const { return core_->world_size(); }

  void Run(Request request, Timeout timeout_s) {
    const double seconds = Check(request, timeout_s);
    core_->Locate(request.operation);
    const InterruptibleCall call(core_.get());
    Status status;
    {
      const nb::gil_scoped_release release;
      status = core_->Run(request.operation, seconds, &HasSignal);
    }
    RaiseIfError(status);
  }

  Handle Submit(Request request, Timeout timeout_s) {
    const double seconds = Check(request, timeout_s);
    core_->Locate(request.operation);
    InterruptibleCall::RaiseIfInside(core_.get());
    held_->LetGoOfDone();
    auto pending = core_->Submit(request.operation, seconds);
    held_->Hold(pending, std::move(request.arguments));
    return {std::move(pending), held_};
  }

  int Join(Timeout timeout_s) {
    const double seconds = Check({}, timeout_s);
    const InterruptibleCall call(core_.get());
    int last = -1;
    Status status;
    {
      const nb::gil_scoped_release release;
      status = core_->Join(seconds, &HasSignal, last);
    }
    RaiseIfError(status);
    return last;
  }

  nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>, nb::c_contig> AddArena(int fd, size_t part_bytes) {
    auto arena = core_->AddArena(fd, part_bytes);
    RaiseIfError(arena.status());
    auto* const kept = new std::shared_ptr<const Arena>(arena.value());
    const nb::capsule owner(kept, [](void* pointer) noexcept {
      delete static_cast<std::shared_ptr<const Arena>*>(pointer);
    });
    const size_t shape[1] = {part_bytes};
    return {arena.value()->own_part(), 1, shape, owner};
  }

  void Abort(const std::string& reason) { core_->Abort(reason); }

  void Close() {
    const InterruptibleCall call(core_.get());
    Status status;
    {
      const nb::gil_scoped_release release;
      status = core_->Close(&HasSignal);
    }
    held_->LetGoOfDone();
    RaiseIfError(status);
  }

  Monitor monitor() const { return {core_->monitor()}; }

  nb::object failure() const {
    const auto text = core_->failure();
    if (!text.has_value()) return nb::none();
    return ToPythonText(*text);
  }

 private:
  double Check(const Request& request, Timeout timeout_s) const {
    const double seconds = timeout_s.value_or(core_->timeout_s());
    if (!(seconds > 0 && std::isfinite(seconds))) {
      RaiseInvalid("timeout_s must be a positive number of seconds, got " +
                   std::to_string(seconds));
    }
    RaiseIfError(core_->Validate(request.operation));
    return seconds;
  }

  // The arrays must outlive the core, whose thread works on them, so they are declared first and
  // destroyed last.
  std::shared_ptr<HeldArrays> held_ = std::make_shared<HeldArrays>();
  std::unique_ptr<Communicator> core_;
};

using Self = CommunicatorObject;

Request Named(Request request, std::string_view name) {
  SetName(request, name);
  return request;
}

// Defines an operation and its asynchronous form. make: converts the arguments of both into a
// request. Both also take a name and a timeout.
template <typename... Arguments, typename... Extras>
void Define(nb::class_<Self>& type, const char* name, const char* async_name,
            Request (*make)(const Self&, Arguments...), const char* doc, const Extras&... extras) {
  using nb::literals::operator""_a;
  type.def(
      name,
      [make](Self& self, Arguments... arguments, std::string_view label, Timeout timeout_s) {
        self.Run(Named(make(self, arguments...), label), timeout_s);
      },
      extras..., "name"_a = "", "timeout_s"_a = nb::none(), doc);
  type.def(
      async_name,
      [make](Self& self, Arguments... arguments, std::string_view label, Timeout timeout_s) {
        return self.Submit(Named(make(self, arguments...), label), timeout_s);
      },
      extras..., "name"_a = "", "timeout_s"_a = nb::none(),
      "Queue the operation and return its handle. Operations run in the order of the calls.");
}

void DefineReductions(nb::class_<Self>& type) {
  using nb::literals::operator""_a;
  const auto op = "op"_a = "sum";
  const auto prescale = "prescale"_a = 1.0;
  const auto postscale = "postscale"_a = 1.0;
  const auto counts = "counts"_a = nb::none();
  Define(
      type, "allreduce", "allreduce_async",
      +[](const Self&, nb::handle array, std::string_view op, double prescale, double postscale) {
        return AllReduceRequest(array, {op, prescale, postscale});
      },
      "Reduce array over all ranks, in place; every rank gets the same bits.", "array"_a, op,
      prescale, postscale);
  Define(
      type, "allreduce_group", "allreduce_group_async",
      +[](const Self&, std::vector<nb::object> arrays, std::string_view op, double prescale,
          double postscale) { return AllReduceGroupRequest(arrays, {op, prescale, postscale}); },
      "Run allreduce on several arrays of one dtype as one operation.", "arrays"_a, op, prescale,
      postscale);
  Define(
      type, "reduce", "reduce_async",
      +[](const Self&, nb::handle array, int root, std::string_view op, double prescale,
          double postscale) { return ReduceRequest(array, root, {op, prescale, postscale}); },
      "Reduce array over all ranks into the root's array; the other ranks keep theirs.", "array"_a,
      "root"_a, op, prescale, postscale);
  Define(
      type, "reduce_scatter", "reduce_scatter_async",
      +[](const Self& self, nb::handle array, nb::handle out, Counts counts, std::string_view op,
          double prescale, double postscale) {
        return ReduceScatterRequest(array, out, counts, {op, prescale, postscale}, self.rank(),
                                    self.world_size());
      },
      "Reduce array, which has a block for each rank, over all ranks. Block r goes to rank r's "
      "out, which may be that block of array.",
      "array"_a, "out"_a, counts, op, prescale, postscale);
  Define(
      type, "reduce_scatter_group", "reduce_scatter_group_async",
      +[](const Self& self, std::vector<nb::object> arrays, std::vector<nb::object> outs,
          GroupCounts counts, std::string_view op, double prescale, double postscale) {
        return ReduceScatterGroupRequest(arrays, outs, counts, {op, prescale, postscale},
                                         self.rank(), self.world_size());
      },
      "Run reduce_scatter on several arrays of one dtype as one operation.", "arrays"_a, "outs"_a,
      counts, op, prescale, postscale);
}

void DefineMovements(nb::class_<Self>& type) {
  using nb::literals::operator""_a;
  const auto counts = "counts"_a = nb::none();
  Define(
      type, "allgather", "allgather_async",
      +[](const Self& self, nb::handle array, nb::handle out, Counts counts) {
        return AllGatherRequest(array, out, counts, self.rank(), self.world_size());
      },
      "Gather every rank's array into out, in rank order. array may be this rank's block of "
      "out.",
      "array"_a, "out"_a, counts);
  Define(
      type, "allgather_group", "allgather_group_async",
      +[](const Self& self, std::vector<nb::object> arrays, std::vector<nb::object> outs,
          GroupCounts counts) {
        return AllGatherGroupRequest(arrays, outs, counts, self.rank(), self.world_size());
      },
      "Run allgather on several arrays of one dtype as one operation.", "arrays"_a, "outs"_a,
      counts);
  Define(
      type, "broadcast", "broadcast_async",
      +[](const Self& self, nb::handle array, int root) {
        return BroadcastRequest(array, root, self.rank());
      },
      "Copy the root's array to the arrays of all ranks.", "array"_a, "root"_a);
  Define(
      type, "gather", "gather_async",
      +[](const Self& self, nb::handle array, nb::handle out, int root, Counts counts) {
        return GatherRequest(array, out, root, counts, self.rank(), self.world_size());
      },
      "Gather every rank's array into the root's out; out is None on the other ranks.", "array"_a,
      "out"_a.none(), "root"_a, counts);
  Define(
      type, "scatter", "scatter_async",
      +[](const Self& self, nb::handle array, nb::handle out, int root, Counts counts) {
        return ScatterRequest(array, out, root, counts, self.rank(), self.world_size());
      },
      "Copy block r of the root's array to rank r's out; array is None on the other ranks.",
      "array"_a.none(), "out"_a, "root"_a, counts);
  Define(
      type, "alltoall", "alltoall_async",
      +[](const Self& self, nb::handle array, nb::handle out, Counts send_counts,
          Counts receive_counts) {
        return AllToAllRequest(array, out, send_counts, receive_counts, self.world_size());
      },
      "Send block r of array to rank r; out receives the blocks of all ranks in rank order.",
      "array"_a, "out"_a, "send_counts"_a = nb::none(), "receive_counts"_a = nb::none());
  Define(
      type, "barrier", "barrier_async", +[](const Self&) { return Request{}; },
      "Return once all ranks have called barrier.");
}

}  // namespace

void DefineCommunicator(nb::module_& module) {
  using nb::literals::operator""_a;
  nb::class_<Self> type(
      module, "Communicator",
      "The open group of ranks, seen from one of them.\n\n"
      "Arrays are buffers in CPU memory: NumPy arrays, torch tensors and other objects that "
      "support DLPack or the buffer protocol; those that are not C-contiguous are copied. "
      "float32, float64, bfloat16, float16, all integers and bool can be reduced, by 'sum', "
      "'avg', 'min', 'max' or 'product'. bfloat16 and float16 accumulate in float32, integer "
      "sums wrap, and integer averages round toward zero.\n\n"
      "counts: number of elements of each rank's block, the same on all ranks; None if the "
      "blocks are equal. name: name of the operation, the same on all ranks.\n\n"
      "timeout_s replaces the communicator's timeout for one operation, in seconds. After an "
      "operation has failed for another reason than a mismatch, all later ones raise the same "
      "error.");
  type.def(
      nb::init<int, const std::vector<int>&, int, std::pair<int, int>, std::pair<int, int>, double,
               std::string_view, Timeout, Timeout, int>(),
      nb::kw_only(), "rank"_a, "host_of_rank"_a, "segment_fd"_a, "lane_fds"_a, "lifeline_fds"_a,
      "timeout_s"_a, "wire"_a = "float32", "stall_warning_s"_a = nb::none(),
      "stall_abort_s"_a = nb::none(), "stall_fd"_a = -1,
      "Take ownership of the descriptors of one rank, even if an error is raised.\n\n"
      "Args:\n"
      "    rank: this rank.\n"
      "    host_of_rank: host index of every rank, hosts numbered by first appearance.\n"
      "    segment_fd: the host's shared segment; -1 if the rank is alone on its host.\n"
      "    lane_fds: sockets to the next host and from the previous one; (-1, -1) if the rank "
      "owns no lane.\n"
      "    lifeline_fds: sockets to the next rank and from the previous one; (-1, -1) in a "
      "world of one.\n"
      "    timeout_s: default timeout of every operation, in seconds.\n"
      "    wire: format in which sums and averages of float32 travel between hosts: 'float32', "
      "'bfloat16' or 'float16', the same on all ranks. They are always accumulated in float32.\n"
      "    stall_warning_s: seconds after which the monitor reports an operation without "
      "progress; None: never.\n"
      "    stall_abort_s: seconds after which an operation without progress fails; None: never.\n"
      "    stall_fd: eventfd that is written to when the monitor reports an operation; -1: "
      "none.");
  DefineReductions(type);
  DefineMovements(type);
  type.def("join", &Self::Join, "timeout_s"_a = nb::none(),
           "Take part with zeros in the operations of the other ranks until all ranks have "
           "called join; return the rank that called it last.")
      .def("add_arena", &Self::AddArena, "fd"_a, "part_bytes"_a,
           "Map memory that the ranks of this host share, with part_bytes for each of them, and "
           "return this rank's part. Arrays that lie at the same offset in every rank's part "
           "are reduced without copies. The caller keeps the descriptor.")
      .def("abort", &Self::Abort, "reason"_a,
           "Make every operation on this rank and on all peers fail with the reason. Returns at "
           "once.")
      .def("close", &Self::Close,
           "Wait for queued operations, at most the default timeout, then leave. Repeated calls "
           "do nothing.")
      .def_prop_ro("monitor", &Self::monitor, "Measurements of the operations.")
      .def_prop_ro("failure", &Self::failure, nb::sig("def failure(self) -> str | None"),
                   "Reason why the communicator failed; None if it has not failed.");
}

}  // namespace sparkdl::bindings
