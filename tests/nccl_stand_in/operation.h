// The operations of the stand-in for NCCL.
#ifndef SPARKDL_TESTS_STAND_IN_OPERATION_H_
#define SPARKDL_TESTS_STAND_IN_OPERATION_H_

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "comm.h"
#include "elements.h"

namespace stand_in {

struct Operation {
  std::string kind;
  const char* input = nullptr;
  char* output = nullptr;
  size_t count = 0;
  int type = 0;
  int reduction = 0;
  int rank = 0;
  std::optional<double> factor;
  Comm* comm = nullptr;
  void* stream = nullptr;

  size_t bytes() const { return count * BytesOf(type); }
};

inline void Reduce(const Operation& o, const std::vector<std::string>& inputs, size_t first,
                   char* output) {
  const size_t size = BytesOf(o.type);
  for (size_t i = 0; i < o.count; ++i) {
    double value = 0;
    for (size_t rank = 0; rank < inputs.size(); ++rank) {
      const double one =
          Load(o.type, inputs[rank].data() + (first + i) * size) * o.factor.value_or(1);
      value = rank == 0 ? one : Combine(o.reduction, value, one);
    }
    if (o.reduction == kAvg) value /= static_cast<double>(inputs.size());
    Store(o.type, output + i * size, value);
  }
}

inline void RunCollective(const Operation& o) {
  Comm& comm = *o.comm;
  const std::string name = "collective." + std::to_string(comm.num_collectives++);
  const size_t sent = o.kind == "ncclReduceScatter" ? o.bytes() * comm.num_ranks : o.bytes();
  const bool sends = o.input != nullptr && (o.kind != "ncclBroadcast" || o.rank == comm.rank);
  const auto inputs = comm.Exchange(name, sends ? std::string(o.input, sent) : "");
  if (!inputs.has_value()) return;
  if (o.kind == "ncclAllReduce") Reduce(o, *inputs, 0, o.output);
  if (o.kind == "ncclReduceScatter") Reduce(o, *inputs, comm.rank * o.count, o.output);
  if (o.kind == "ncclReduce" && o.rank == comm.rank) Reduce(o, *inputs, 0, o.output);
  if (o.kind == "ncclBroadcast") std::memcpy(o.output, (*inputs)[o.rank].data(), o.bytes());
  if (o.kind == "ncclAllGather") {
    for (int rank = 0; rank < comm.num_ranks; ++rank) {
      std::memcpy(o.output + rank * o.bytes(), (*inputs)[rank].data(), o.bytes());
    }
  }
}

inline std::string MessageName(int from, int to, long number) {
  return "message." + std::to_string(from) + "." + std::to_string(to) + "." +
         std::to_string(number);
}

// What NCCL can buffer of a message; a larger one occupies its stream until it is received.
constexpr size_t kBuffered = 4 << 20;

// Waits for the last message that was sent to the peer of a send.
inline void AwaitReceived(const Operation& o) {
  const Comm& comm = *o.comm;
  if (o.bytes() > kBuffered) {
    comm.AwaitTaken(MessageName(comm.rank, o.rank, comm.num_sent.at(o.rank) - 1));
  }
}

inline void RunOne(const Operation& o) {
  Comm& comm = *o.comm;
  if (o.kind == "ncclSend") {
    comm.PutFile(MessageName(comm.rank, o.rank, comm.num_sent[o.rank]++),
                 std::string(o.input, o.bytes()));
  } else if (o.kind == "ncclRecv") {
    const std::string name = MessageName(o.rank, comm.rank, comm.num_received[o.rank]++);
    const auto message = comm.AwaitFile(name);
    if (message.has_value()) {
      std::memcpy(o.output, message->data(), std::min(o.bytes(), message->size()));
      std::filesystem::remove(comm.folder / name);
    }
  } else {
    RunCollective(o);
  }
}

}  // namespace stand_in

#endif  // SPARKDL_TESTS_STAND_IN_OPERATION_H_
