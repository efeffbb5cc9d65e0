// A rank that is played by hand, as far as a test wants it to get.
#ifndef SPARKDL_TESTS_PUPPET_H_
#define SPARKDL_TESTS_PUPPET_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "sparkdl/operation.h"
#include "world.h"

namespace sparkdl::tests {

// Plays a rank of a world that never opened. It says to be about to do an operation, the world's
// first, and then does what it is told to.
class Puppet {
 public:
  Puppet(const World& world, int rank) : options_(world.options(rank)), rank_(rank) {}

  // Inside its host: synchronises so many times in all.
  void Sync(const Operation& operation, uint32_t times) const;
  // Waits until another rank of its host has synchronised so many times.
  void AwaitSync(int local_rank, uint32_t times) const;

  // On its lane: says that its host is about to do the operation.
  void SayHello(const Operation& operation) const;
  void Send(const std::string& bytes) const;
  // Returns when the next rank of the lane has taken, or the previous one has sent, all but what a
  // socket holds.
  void SendMuch(size_t bytes) const;
  void ReceiveMuch(size_t bytes) const;

  void SendOnLifeline(const std::string& bytes) const;
  // Waits until the previous rank calls the roll, and answers for a rank that it has begun so many
  // operations.
  void AnswerRoll(int rank, uint64_t num_begun) const;

 private:
  int local_rank() const;

  const CommunicatorOptions& options_;
  const int rank_;
};

}  // namespace sparkdl::tests

#endif  // SPARKDL_TESTS_PUPPET_H_
