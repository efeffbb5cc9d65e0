#include "bindings/communicator_class.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/errors.h"
#include "bindings/handle_class.h"
#include "bindings/request.h"
#include "bindings/text.h"
#include "sparkdl/communicator.h"

namespace sparkdl::bindings {
namespace {

using Timeout = std::optional<double>;

class CommunicatorObject {
 public:
  CommunicatorObject(int rank, const std::vector<int>& host_of_rank, int segment_fd,
                     std::pair<int, int> lane_fds, std::pair<int, int> lifeline_fds,
                     double timeout_s) {
    CommunicatorOptions options;
    options.rank = rank;
    options.host_of_rank = host_of_rank;
    options.segment_fd = segment_fd;
    options.lane_to_next_fd = lane_fds.first;
    options.lane_from_previous_fd = lane_fds.second;
    options.lifeline_to_next_fd = lifeline_fds.first;
    options.lifeline_from_previous_fd = lifeline_fds.second;
    options.timeout_s = timeout_s;
    auto opened = Communicator::Open(options);
    RaiseIfError(opened.status());
    core_ = std::move(opened).value();
  }

  int world_size() const { return core_->world_size(); }

  void Run(const Request& request, Timeout timeout_s) {
    const double seconds = Check(request, timeout_s);
    Status status;
    {
      const nb::gil_scoped_release release;
      status = core_->Run(request.operation, seconds, &HasSignal);
    }
    RaiseIfError(status);
  }

  Handle Submit(Request request, Timeout timeout_s) {
    const double seconds = Check(request, timeout_s);
    held_->LetGoOfDone();
    auto pending = core_->Submit(request.operation, seconds);
    held_->Hold(pending, std::move(request.arguments));
    return {std::move(pending), held_};
  }

  void Abort(const std::string& reason) { core_->Abort(reason); }

  void Close() {
    Status status;
    {
      const nb::gil_scoped_release release;
      status = core_->Close(&HasSignal);
    }
    held_->LetGoOfDone();
    RaiseIfError(status);
  }

  nb::object failure() const {
    const auto text = core_->failure();
    if (!text.has_value()) return nb::none();
    return ToPythonText(*text);
  }

 private:
  double Check(const Request& request, Timeout timeout_s) const {
    const double seconds = timeout_s.value_or(core_->timeout_s());
    if (!(seconds > 0)) {
      RaiseIfError(Status(StatusCode::kInvalidArgument,
                          "timeout_s must be positive, got " + std::to_string(seconds)));
    }
    RaiseIfError(core_->Validate(request.operation));
    return seconds;
  }

  // The arrays must outlive the core, whose thread works on them: declared first, destroyed last.
  std::shared_ptr<HeldArrays> held_ = std::make_shared<HeldArrays>();
  std::unique_ptr<Communicator> core_;
};

using Self = CommunicatorObject;

void DefineSynchronous(nb::class_<Self>& type) {
  using nb::literals::operator""_a;
  type.def(
          "allreduce",
          [](Self& self, nb::handle array, std::string_view op, Timeout timeout_s) {
            self.Run(AllReduceRequest(array, op), timeout_s);
          },
          "array"_a, "op"_a = "sum", "timeout_s"_a = nb::none(),
          "Reduce array over all ranks, in place; every rank gets the same bits.")
      .def(
          "reduce_scatter",
          [](Self& self, nb::handle array, nb::handle out, std::string_view op, Timeout timeout_s) {
            self.Run(ReduceScatterRequest(array, out, op, self.world_size()), timeout_s);
          },
          "array"_a, "out"_a, "op"_a = "sum", "timeout_s"_a = nb::none(),
          "Reduce array, world_size blocks as large as out, over all ranks; block r goes to rank "
          "r's "
          "out. out may be that block of array.")
      .def(
          "allgather",
          [](Self& self, nb::handle array, nb::handle out, Timeout timeout_s) {
            self.Run(AllGatherRequest(array, out, self.world_size()), timeout_s);
          },
          "array"_a, "out"_a, "timeout_s"_a = nb::none(),
          "Gather every rank's array into out, world_size blocks in order of ranks. array may be "
          "this "
          "rank's block of out.")
      .def(
          "broadcast",
          [](Self& self, nb::handle array, int root, Timeout timeout_s) {
            self.Run(BroadcastRequest(array, root), timeout_s);
          },
          "array"_a, "root"_a, "timeout_s"_a = nb::none(),
          "Copy rank root's array to all ranks, in place.")
      .def(
          "barrier", [](Self& self, Timeout timeout_s) { self.Run({}, timeout_s); },
          "timeout_s"_a = nb::none(), "Return once all ranks have called it.");
}

void DefineAsynchronous(nb::class_<Self>& type) {
  using nb::literals::operator""_a;
  type.def(
          "allreduce_async",
          [](Self& self, nb::handle array, std::string_view op, Timeout timeout_s) {
            return self.Submit(AllReduceRequest(array, op), timeout_s);
          },
          "array"_a, "op"_a = "sum", "timeout_s"_a = nb::none(),
          "Queue allreduce; operations run in the order of submission.")
      .def(
          "reduce_scatter_async",
          [](Self& self, nb::handle array, nb::handle out, std::string_view op, Timeout timeout_s) {
            return self.Submit(ReduceScatterRequest(array, out, op, self.world_size()), timeout_s);
          },
          "array"_a, "out"_a, "op"_a = "sum", "timeout_s"_a = nb::none(), "Queue reduce_scatter.")
      .def(
          "allgather_async",
          [](Self& self, nb::handle array, nb::handle out, Timeout timeout_s) {
            return self.Submit(AllGatherRequest(array, out, self.world_size()), timeout_s);
          },
          "array"_a, "out"_a, "timeout_s"_a = nb::none(), "Queue allgather.")
      .def(
          "broadcast_async",
          [](Self& self, nb::handle array, int root, Timeout timeout_s) {
            return self.Submit(BroadcastRequest(array, root), timeout_s);
          },
          "array"_a, "root"_a, "timeout_s"_a = nb::none(), "Queue broadcast.")
      .def(
          "barrier_async", [](Self& self, Timeout timeout_s) { return self.Submit({}, timeout_s); },
          "timeout_s"_a = nb::none(), "Queue barrier.");
}

}  // namespace

void DefineCommunicator(nb::module_& module) {
  using nb::literals::operator""_a;
  nb::class_<Self> type(
      module, "Communicator",
      "The open group of ranks, seen from one of them.\n\n"
      "Arrays are C-contiguous buffers in CPU memory: NumPy arrays, torch tensors and whatever "
      "else "
      "speaks DLPack or the buffer protocol. float32, float64, bfloat16, float16, int32, int64 and "
      "uint8 can be reduced, by 'sum', 'avg', 'min', 'max' or 'product'; bfloat16 and float16 "
      "accumulate in float32, integer sums wrap, integer averages round toward zero.\n\n"
      "timeout_s, in seconds, replaces the communicator's own for one operation. After an "
      "operation "
      "failed, all later ones raise the same error.");
  type.def(
      nb::init<int, const std::vector<int>&, int, std::pair<int, int>, std::pair<int, int>,
               double>(),
      nb::kw_only(), "rank"_a, "host_of_rank"_a, "segment_fd"_a, "lane_fds"_a, "lifeline_fds"_a,
      "timeout_s"_a,
      "Take over the descriptors of one rank; a ValueError leaves them with the caller.\n\n"
      "host_of_rank has the host of every rank, numbered by first appearance. segment_fd is -1 if "
      "the rank is alone on its host, lane_fds (to the next host, from the previous one) are "
      "(-1, -1) if it owns no lane, lifeline_fds (to the next rank, from the previous one) in a "
      "world of one. timeout_s is the default deadline of every operation, in seconds.");
  DefineSynchronous(type);
  DefineAsynchronous(type);
  type.def("abort", &Self::Abort, "reason"_a,
           "Make every operation here and on all peers fail with the reason; returns at once.")
      .def("close", &Self::Close,
           "Wait for what is queued, at most the default timeout, then leave. Can be called again.")
      .def_prop_ro("failure", &Self::failure, nb::sig("def failure(self) -> str | None"),
                   "Why the communicator failed; None while it has not.");
}

}  // namespace sparkdl::bindings
