#include "bindings/monitor_class.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <chrono>

#include "bindings/text.h"

namespace sparkdl::bindings {
namespace {

nb::list Totals(const Monitor& self) {
  nb::list list;
  for (const KindTotals& kind : self.monitor->totals()) {
    list.append(nb::make_tuple(NameOf(kind.kind), kind.count, kind.num_failed, kind.bytes,
                               kind.busy_ns, kind.waiting_ns, kind.queued_ns, kind.exposed_ns));
  }
  return list;
}

nb::list LatenessOf(const Monitor& self) {
  nb::list list;
  for (const Lateness& late : self.monitor->lateness()) {
    list.append(nb::make_tuple(late.rank, late.count, late.waited_ns));
  }
  return list;
}

nb::list Arrivals(const Monitor& self) {
  nb::list list;
  for (const Arrival& arrival : self.monitor->arrivals()) {
    list.append(nb::make_tuple(arrival.sequence, arrival.time_ns));
  }
  return list;
}

nb::tuple TakeRecords(const Monitor& self) {
  nb::list list;
  const OperationMonitor::Records taken = self.monitor->TakeRecords();
  for (const OperationRecord& record : taken.records) {
    const OperationTimes& times = record.times;
    list.append(nb::make_tuple(record.sequence, NameOf(record.kind), ToPythonText(record.name),
                               record.bytes, NameOf(record.dtype), record.is_ok, times.queued,
                               times.begun, times.arrived, times.ready, times.done, times.last));
  }
  return nb::make_tuple(list, taken.num_dropped);
}

nb::object TakeStall(const Monitor& self) {
  const auto notice = self.monitor->stalls().Take();
  if (!notice.has_value()) return nb::none();
  return nb::make_tuple(notice->sequence, ToPythonText(notice->operation), notice->waited_s,
                        ToPythonText(notice->who));
}

nb::list Waits(const Monitor& self) {
  nb::list list;
  if (const auto wait = self.monitor->stalls().wait(); wait.has_value()) {
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - wait->since;
    list.append(nb::make_tuple(ToPythonText(wait->operation), waited.count(), wait->timeout_s));
  }
  return list;
}

}  // namespace

void DefineMonitor(nb::module_& module) {
  using nb::literals::operator""_a;
  nb::class_<Monitor>(module, "Monitor",
                      "Measurements of a communicator's operations; available also after it is "
                      "closed.\n\n"
                      "Times are integers in nanoseconds; points in time are those of "
                      "time.monotonic_ns(). 0 stands for a time that was not measured.")
      .def("totals", &Totals,
           nb::sig("def totals(self) -> list[tuple[str, int, int, int, int, int, int, int]]"),
           "Totals of each kind of operation: kind, number of operations, number of failed "
           "ones, bytes, busy time, part of it spent waiting for other ranks to join, time "
           "queued before, and part of the busy time in which a thread of the caller was "
           "blocked.")
      .def("lateness", &LatenessOf, nb::sig("def lateness(self) -> list[tuple[int, int, int]]"),
           "Ranks of this host that were the last that this rank waited for: rank, number of "
           "operations, total waiting time.")
      .def("arrivals", &Arrivals, nb::sig("def arrivals(self) -> list[tuple[int, int]]"),
           "Number of each of the latest operations, and time at which this rank joined it, if "
           "the communicator spans hosts.")
      .def(
          "start_recording",
          [](const Monitor& self, size_t max_records) {
            self.monitor->StartRecording(max_records);
          },
          "max_records"_a,
          "Begin to record operations; the latest max_records are kept until they are taken.")
      .def(
          "stop_recording", [](const Monitor& self) { self.monitor->StopRecording(); },
          "Stop recording operations.")
      .def("take_records", &TakeRecords,
           nb::sig("def take_records(self) -> tuple[list[tuple[int, str, str, int, str, bool, int, "
                   "int, int, int, int, int]], int]"),
           "Remove and return the records of operations, and the number of dropped ones.\n\n"
           "A record has number, kind, name, bytes, dtype, whether the operation succeeded, the "
           "times at which it was queued, began, waited for other ranks, had been joined by all "
           "ranks and was done, and the rank that joined last, -1 if this rank did not wait or "
           "does not know it.")
      .def("take_stall", &TakeStall,
           nb::sig("def take_stall(self) -> tuple[int, str, float, str] | None"),
           "Remove and return the notice about an operation without progress, if there is one: "
           "its number, its description, the seconds waited, and which ranks are missing.")
      .def("waits", &Waits, nb::sig("def waits(self) -> list[tuple[str, float, float]]"),
           "The operation that has made no progress for 0.2 s or longer, if there is one: its "
           "description, the seconds waited, and its timeout_s.");
}

}  // namespace sparkdl::bindings
