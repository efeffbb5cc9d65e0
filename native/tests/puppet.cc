#include "puppet.h"

#include <sys/socket.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "check.h"
#include "sparkdl/deadline.h"

namespace sparkdl::tests {
namespace {

// As in ring.cc.
struct Hello {
  uint64_t digest;
  uint32_t magic;
  uint32_t agrees;
};
constexpr uint32_t kHelloMagic = 0x53504833;

// As in lifeline.h.
struct LifelineHeader {
  uint32_t magic;
  uint8_t type;
  uint8_t code;
  uint16_t text_bytes;
  int32_t rank;
  uint32_t call;
  uint64_t next_sequence;
};
static_assert(sizeof(LifelineHeader) == 24);
constexpr uint8_t kRollCall = 2;
constexpr uint8_t kAnswer = 3;

template <typename T>
std::string BytesOfMessage(const T& message) {
  return std::string(reinterpret_cast<const char*>(&message), sizeof(message));
}

uint64_t DigestOfFirst(const Operation& operation) { return DigestOf(SignatureOf(operation, 0)); }

void SendAll(int fd, const std::string& bytes) {
  CHECK_EQ(::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL),
           static_cast<ssize_t>(bytes.size()));
}

}  // namespace

int Puppet::local_rank() const {
  const auto& hosts = options_.host_of_rank;
  return static_cast<int>(std::count(hosts.begin(), hosts.begin() + rank_, hosts[rank_]));
}

void Puppet::Sync(const Operation& operation, uint32_t times) const {
  FlagLine& line = options_.segment->line(local_rank());
  line.digests[0] = DigestOfFirst(operation);
  line.phase.store(times);
}

void Puppet::AwaitSync(int local_rank, uint32_t times) const {
  Deadline deadline(10);
  while (options_.segment->line(local_rank).phase.load() < times && !deadline.Passed()) {
    std::this_thread::yield();
  }
  CHECK(options_.segment->line(local_rank).phase.load() >= times);
}

void Puppet::SayHello(const Operation& operation) const {
  const Hello hello{.digest = DigestOfFirst(operation), .magic = kHelloMagic, .agrees = 1};
  Send(BytesOfMessage(hello));
}

void Puppet::Send(const std::string& bytes) const { SendAll(options_.lane_to_next_fd, bytes); }

void Puppet::SendMuch(size_t bytes) const { Send(std::string(bytes, '\0')); }

void Puppet::ReceiveMuch(size_t bytes) const {
  std::vector<char> buffer(bytes);
  CHECK_EQ(::recv(options_.lane_from_previous_fd, buffer.data(), bytes, MSG_WAITALL),
           static_cast<ssize_t>(bytes));
}

void Puppet::SendOnLifeline(const std::string& bytes) const {
  SendAll(options_.lifeline_to_next_fd, bytes);
}

void Puppet::AnswerRoll(int rank, uint64_t num_begun) const {
  LifelineHeader message{};
  CHECK_EQ(::recv(options_.lifeline_from_previous_fd, &message, sizeof(message), MSG_WAITALL),
           static_cast<ssize_t>(sizeof(message)));
  CHECK_EQ(message.type, kRollCall);
  message.type = kAnswer;
  message.rank = rank;
  message.next_sequence = num_begun;
  SendOnLifeline(BytesOfMessage(message));
}

}  // namespace sparkdl::tests
