// A rank that a test controls step by step.
#ifndef SPARKDL_TESTS_PUPPET_H_
#define SPARKDL_TESTS_PUPPET_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "sparkdl/operation.h"
#include "world.h"

namespace sparkdl::tests {

// Plays a rank of a world that never opened. It announces an operation, the world's first, and then
// does what the test tells it to do.
class Puppet {
 public:
  Puppet(const World& world, int rank) : options_(world.options(rank)), rank_(rank) {}

  // Within its host: announces the operation, and sets the number of its synchronisations.
  void Sync(const Operation& operation, uint32_t times) const;
  // Waits until another rank of its host has synchronised this many times.
  void AwaitSync(int local_rank, uint32_t times) const;

  // On its lane: announces that its host is about to run the operation.
  void SayHello(const Operation& operation) const;
  void Send(const std::string& bytes) const;
  // Returns when the next rank on the lane has received, or the previous one has sent, all but what
  // fits into the buffer of a socket.
  void SendMuch(size_t bytes) const;
  void ReceiveMuch(size_t bytes) const;

  void SendOnLifeline(const std::string& bytes) const;
  // Waits until the previous rank calls the roll, and answers for `rank` that it has begun
  // num_begun operations.
  void AnswerRoll(int rank, uint64_t num_begun) const;

 private:
  int local_rank() const;

  const CommunicatorOptions& options_;
  const int rank_;
};

}  // namespace sparkdl::tests

#endif  // SPARKDL_TESTS_PUPPET_H_
