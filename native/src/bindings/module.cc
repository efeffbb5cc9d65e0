// The extension module sparkdl._native.
#include <nanobind/nanobind.h>

#include <cstddef>
#include <string>

#include "bindings/columns.h"
#include "bindings/communicator_class.h"
#include "bindings/dlpack.h"
#include "bindings/errors.h"
#include "bindings/handle_class.h"
#include "bindings/monitor_class.h"
#include "bindings/nccl_class.h"
#include "sparkdl/shm/arena.h"
#include "sparkdl/shm/segment.h"

namespace {

size_t SegmentBytes(int local_size) {
  if (local_size < 1) {
    sparkdl::bindings::RaiseIfError(
        sparkdl::Status(sparkdl::StatusCode::kInvalidArgument,
                        "local_size must be at least 1, got " + std::to_string(local_size)));
  }
  return sparkdl::Segment::BytesFor(local_size);
}

}  // namespace

NB_MODULE(_native, module) {
  using nanobind::literals::operator""_a;
  // A rank that ends with an open communicator has leaked nothing.
  nanobind::set_leak_warnings(false);
  module.doc() =
      "The data path of the collectives: shared memory within a host, TCP rings between hosts; and "
      "the columns of a feed as one matrix.\n\n"
      "It opens no sockets and resolves no names: it receives connected, authenticated "
      "descriptors.";
  sparkdl::bindings::DefineHandle(module);
  sparkdl::bindings::DefineMonitor(module);
  sparkdl::bindings::DefineCommunicator(module);
  sparkdl::bindings::DefineNccl(module);
  sparkdl::bindings::DefineDescribeDlpack(module);
  sparkdl::bindings::DefineJoinColumns(module);
  module.def("segment_bytes", &SegmentBytes, "local_size"_a,
             "Return the size in bytes of the zero-filled segment that local_size ranks of a "
             "host share.");
  module.def("arena_part_bytes", &sparkdl::Arena::PartBytesFor, "num_bytes"_a,
             "Return the size in bytes of each rank's part of an arena, for num_bytes of the "
             "rank's own arrays.");
}
