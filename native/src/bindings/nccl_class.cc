#include "bindings/nccl_class.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/errors.h"
#include "bindings/signals.h"
#include "bindings/text.h"
#include "sparkdl/nccl/communicator.h"

namespace sparkdl::bindings {
namespace {

namespace nb = nanobind;
using nb::literals::operator""_a;

template <typename T>
T ValueOrRaise(Result<T> result) {
  RaiseIfError(result.status());
  return std::move(result).value();
}

template <typename Call>
auto WithoutGil(const Call& call) {
  const nb::gil_scoped_release release;
  return call();
}

class NcclLibraryObject {
 public:
  NcclLibraryObject(const std::vector<std::string>& nccl, const std::vector<std::string>& cuda)
      : library_(ValueOrRaise(NcclLibrary::Load(nccl, cuda))) {}

  const std::shared_ptr<const NcclLibrary>& get() const { return library_; }
  std::string version() const { return FormatNcclVersion(library_->version()); }

  nb::bytes UniqueId() const {
    const NcclUniqueId id = ValueOrRaise(library_->NewUniqueId());
    return nb::bytes(id.bytes, sizeof(id.bytes));
  }

  std::pair<std::string, std::string> IdOfGpu(int gpu) const {
    const NcclLibrary::GpuId id = ValueOrRaise(library_->IdOfGpu(gpu));
    return {id.uuid, id.bus_id};
  }

 private:
  std::shared_ptr<const NcclLibrary> library_;
};

class NcclCommunicatorObject {
 public:
  NcclCommunicatorObject(const NcclLibraryObject& library, int gpu, const nb::bytes& unique_id,
                         int rank, int world_size, const std::string& name, double timeout_s) {
    NcclUniqueId id = {};
    if (unique_id.size() != sizeof(id.bytes)) {
      RaiseIfError(Status(StatusCode::kInvalidArgument,
                          "unique_id must have " + std::to_string(sizeof(id.bytes)) +
                              " bytes, got " + std::to_string(unique_id.size())));
    }
    std::memcpy(id.bytes, unique_id.c_str(), sizeof(id.bytes));
    NcclOptions options{
        .rank = rank, .world_size = world_size, .name = name, .timeout_s = timeout_s};
    core_ = ValueOrRaise(
        WithoutGil([&] { return NcclCommunicator::Begin(library.get(), gpu, id, options); }));
  }

  explicit NcclCommunicatorObject(std::unique_ptr<NcclCommunicator> core)
      : core_(std::move(core)) {}

  bool WaitReady(double timeout_s) {
    const InterruptibleCall call(core_.get());
    return ValueOrRaise(WithoutGil([&] { return core_->WaitReady(timeout_s, &HasSignal); }));
  }

  std::unique_ptr<NcclCommunicatorObject> Split(std::optional<int> color, int key, int rank,
                                                int world_size, const std::string& name,
                                                double timeout_s) {
    NcclOptions options{
        .rank = rank, .world_size = world_size, .name = name, .timeout_s = timeout_s};
    const InterruptibleCall call(core_.get());
    auto core = ValueOrRaise(WithoutGil(
        [&] { return core_->BeginSplit(color.value_or(kNcclNoColor), key, options, &HasSignal); }));
    if (core == nullptr) return nullptr;
    return std::make_unique<NcclCommunicatorObject>(std::move(core));
  }

  uint64_t Run(const std::vector<NcclOperation>& operations, uintptr_t stream, double timeout_s,
               std::optional<uintptr_t> after) {
    const InterruptibleCall call(core_.get());
    std::optional<CudaStream> follows;
    if (after.has_value()) follows = StreamOf(*after);
    return ValueOrRaise(WithoutGil(
        [&] { return core_->Run(operations, StreamOf(stream), follows, timeout_s, &HasSignal); }));
  }

  void Join(uint64_t number, uintptr_t stream) {
    RaiseIfError(core_->Join(number, StreamOf(stream)));
  }

  void Wait(uint64_t number, double timeout_s) {
    const InterruptibleCall call(core_.get());
    RaiseIfError(WithoutGil([&] { return core_->Wait(number, timeout_s, &HasSignal); }));
  }

  bool IsDone(uint64_t number) { return ValueOrRaise(core_->IsDone(number)); }
  bool busy() const { return core_->busy(); }

  void Abort(const std::string& reason) { core_->Abort(Status(StatusCode::kAborted, reason)); }

  void Close() {
    const InterruptibleCall call(core_.get());
    RaiseIfError(WithoutGil([&] { return core_->Close(&HasSignal); }));
  }

  nb::object failure() const {
    const auto text = core_->failure();
    if (!text.has_value()) return nb::none();
    return ToPythonText(*text);
  }

 private:
  static CudaStream StreamOf(uintptr_t stream) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): Python has streams as integers
    return reinterpret_cast<CudaStream>(stream);
  }

  std::unique_ptr<NcclCommunicator> core_;
};

// The part that all operations have: buffers, number of elements and dtype.
NcclOperation MakeOperation(NcclKind kind, uintptr_t input, uintptr_t output, size_t count,
                            std::string_view dtype) {
  NcclOperation operation;
  operation.kind = kind;
  operation.input = reinterpret_cast<const void*>(input);  // NOLINT(performance-no-int-to-ptr)
  operation.output = reinterpret_cast<void*>(output);      // NOLINT(performance-no-int-to-ptr)
  operation.count = count;
  operation.type = ValueOrRaise(NcclTypeOf(dtype)).number;
  return operation;
}

NcclOperation MakeReduction(NcclKind kind, uintptr_t input, uintptr_t output, size_t count,
                            std::string_view dtype, std::string_view op, const nb::bytes& factor) {
  NcclOperation operation = MakeOperation(kind, input, output, count, dtype);
  operation.reduction = ValueOrRaise(NcclReductionOf(op));
  operation.factor = std::string(factor.c_str(), factor.size());
  const size_t bytes = ValueOrRaise(NcclTypeOf(dtype)).bytes;
  if (!operation.factor.empty() && (op != "sum" || operation.factor.size() != bytes)) {
    RaiseIfError(Status(StatusCode::kInvalidArgument,
                        "factor must be one " + std::string(dtype) + " (" + std::to_string(bytes) +
                            " bytes) of a sum, got " + std::to_string(factor.size()) +
                            " bytes with op='" + std::string(op) + "'"));
  }
  return operation;
}

void DefineOperation(nb::module_& module) {
  using Op = NcclOperation;
  nb::class_<Op>(module, "NcclOperation",
                 "An NCCL operation on GPU memory, which is given by its address.\n\n"
                 "input may equal output; for reduce_scatter and allgather the smaller buffer "
                 "may be this rank's block of the larger one. factor: one element, as bytes. A sum "
                 "multiplies every rank's input by it.")
      .def_static(
          "allreduce",
          [](uintptr_t input, uintptr_t output, size_t count, std::string_view dtype,
             std::string_view op, const nb::bytes& factor) {
            return MakeReduction(NcclKind::kAllReduce, input, output, count, dtype, op, factor);
          },
          "input"_a, "output"_a, "count"_a, "dtype"_a, "op"_a = "sum", "factor"_a = nb::bytes(""),
          "Reduce count elements over all ranks; every rank gets the result.")
      .def_static(
          "reduce_scatter",
          [](uintptr_t input, uintptr_t output, size_t count, std::string_view dtype,
             std::string_view op, const nb::bytes& factor) {
            return MakeReduction(NcclKind::kReduceScatter, input, output, count, dtype, op, factor);
          },
          "input"_a, "output"_a, "count"_a, "dtype"_a, "op"_a = "sum", "factor"_a = nb::bytes(""),
          "Reduce world_size blocks of count elements over all ranks; rank r gets block r.")
      .def_static(
          "reduce",
          [](uintptr_t input, uintptr_t output, size_t count, std::string_view dtype, int root,
             std::string_view op, const nb::bytes& factor) {
            Op operation =
                MakeReduction(NcclKind::kReduce, input, output, count, dtype, op, factor);
            operation.rank = root;
            return operation;
          },
          "input"_a, "output"_a, "count"_a, "dtype"_a, "root"_a, "op"_a = "sum",
          "factor"_a = nb::bytes(""),
          "Reduce count elements over all ranks; the root gets the result.")
      .def_static(
          "allgather",
          [](uintptr_t input, uintptr_t output, size_t count, std::string_view dtype) {
            return MakeOperation(NcclKind::kAllGather, input, output, count, dtype);
          },
          "input"_a, "output"_a, "count"_a, "dtype"_a,
          "Gather every rank's block of count elements, in rank order.")
      .def_static(
          "broadcast",
          [](uintptr_t input, uintptr_t output, size_t count, std::string_view dtype, int root) {
            Op operation = MakeOperation(NcclKind::kBroadcast, input, output, count, dtype);
            operation.rank = root;
            return operation;
          },
          "input"_a, "output"_a, "count"_a, "dtype"_a, "root"_a,
          "Copy the root's count elements to all ranks.")
      .def_static(
          "send",
          [](uintptr_t input, size_t count, std::string_view dtype, int to) {
            Op operation = MakeOperation(NcclKind::kSend, input, 0, count, dtype);
            operation.rank = to;
            return operation;
          },
          "input"_a, "count"_a, "dtype"_a, "to"_a,
          "Send count elements to a rank, which must receive as many.")
      .def_static(
          "recv",
          [](uintptr_t output, size_t count, std::string_view dtype, int source) {
            Op operation = MakeOperation(NcclKind::kRecv, 0, output, count, dtype);
            operation.rank = source;
            return operation;
          },
          "output"_a, "count"_a, "dtype"_a, "source"_a, "Receive count elements from a rank.")
      .def("__repr__", [](const Op& operation) { return "<" + Describe(operation) + ">"; });
}

void DefineCommunicator(nb::module_& module) {
  using Self = NcclCommunicatorObject;
  nb::class_<Self>(module, "NcclCommunicator",
                   "An NCCL communicator, one GPU per rank. run does not wait for data.")
      .def(nb::init<const NcclLibraryObject&, int, const nb::bytes&, int, int, const std::string&,
                    double>(),
           nb::kw_only(), "library"_a, "gpu"_a, "unique_id"_a, "rank"_a, "world_size"_a, "name"_a,
           "timeout_s"_a,
           "Begin to open the communicator. All ranks do so with the same unique_id, and then "
           "call wait_ready.\n\n"
           "timeout_s: longest time that close may take, in seconds.")
      .def("wait_ready", &Self::WaitReady, "timeout_s"_a,
           "Wait until opening or splitting is complete; return False if that takes longer than "
           "timeout_s.")
      .def("split", &Self::Split, "color"_a, "key"_a, nb::kw_only(), "rank"_a, "world_size"_a,
           "name"_a, "timeout_s"_a,
           nb::sig("def split(self, color: int | None, key: int, *, "
                   "rank: int, world_size: int, name: str, timeout_s: "
                   "float) -> NcclCommunicator | None"),
           "Begin to split off a communicator of the ranks with the same color, ordered by "
           "their keys.\n\n"
           "All ranks must make this call; a rank without a color gets None. rank, world_size "
           "and name are those in the new communicator.")
      .def("run", &Self::Run, "operations"_a, "stream"_a, "timeout_s"_a, "after"_a = nb::none(),
           "Put operations on a stream (a cudaStream_t as an integer) as one group, and return "
           "the number of the group.\n\n"
           "If they are not complete within timeout_s seconds, the communicator fails. They also "
           "follow the work that is on the stream after, if one is given.")
      .def("join", &Self::Join, "number"_a, "stream"_a,
           "Make later work on a stream follow the group with this number. Returns at once.")
      .def("done", &Self::IsDone, "number"_a,
           "Whether the group with this number and all before it are complete on the GPU.")
      .def("wait", &Self::Wait, "number"_a, "timeout_s"_a,
           "Wait until done(number). Raises CommunicatorTimeoutError if that takes longer than "
           "timeout_s seconds; the operations then continue.")
      .def_prop_ro("busy", &Self::busy, "Whether any operation is known to be in progress.")
      .def("abort", &Self::Abort, "reason"_a,
           "Abort the operations in progress on this rank and make later calls fail. Returns at "
           "once.")
      .def("close", &Self::Close,
           "Wait for the operations in progress, then leave. Repeated calls do nothing.")
      .def_prop_ro("failure", &Self::failure, nb::sig("def failure(self) -> str | None"),
                   "Reason why the communicator failed; None if it has not failed.");
}

}  // namespace

void DefineNccl(nb::module_& module) {
  nb::class_<NcclLibraryObject>(module, "NcclLibrary",
                                "NCCL and the CUDA driver, loaded at run time.")
      .def(nb::init<const std::vector<std::string>&, const std::vector<std::string>&>(), "nccl"_a,
           "cuda"_a,
           "Load from each list the first name or path that can be opened.\n\n"
           "Raises CommunicatorError, which says what was tried.")
      .def_prop_ro(
          "path", [](const NcclLibraryObject& self) { return self.get()->path(); },
          "Path of the loaded NCCL library.")
      .def_prop_ro("version", &NcclLibraryObject::version, "Version of NCCL, such as '2.27.6'.")
      .def("unique_id", &NcclLibraryObject::UniqueId,
           "Create the id of a communicator. One rank creates it for all.")
      .def("gpu_id", &NcclLibraryObject::IdOfGpu, "gpu"_a,
           "Uuid and bus address of a GPU that this process sees.");
  DefineOperation(module);
  DefineCommunicator(module);
}

}  // namespace sparkdl::bindings
