#include "disagreement.h"

#include <mutex>

#include "check.h"

namespace sparkdl::tests {
namespace {

constexpr size_t kBytes = size_t{1024} * 1024;
constexpr std::byte kUntouched{0x3c};

}  // namespace

Saying::Saying() : input_(kBytes, kUntouched), output_(kBytes, kUntouched) {}

Operation Saying::Of(OpKind kind, size_t count, Dtype dtype) {
  Operation operation = Between(kind, input_.data(), output_.data(), count, dtype);
  if (IsRooted(kind)) operation.root = 0;
  return operation;
}

bool Saying::is_untouched() const {
  const Bytes before(kBytes, kUntouched);
  return AreSame(input_, before) && AreSame(output_, before);
}

std::string Disagree(World& world, const std::function<Operation(Saying&, int)>& say) {
  std::mutex mutex;
  std::string told;
  world.Run([&](Communicator& communicator, int rank) {
    Saying saying;
    const Operation operation = say(saying, rank);
    const Status status = communicator.Run(operation, kTimeout, nullptr);
    CHECK(status.code() == StatusCode::kMismatch);
    CHECK(saying.is_untouched());
    {
      const std::scoped_lock lock(mutex);
      if (told.empty()) told = status.ToString();
      CHECK_EQ(status.ToString(), told);
    }
    RunTrial(communicator, Trials(communicator).AllReduce({}, 20'011));
    RunTrial(communicator, Trials(communicator).AllToAll(Dtype::kInt16, 11));
    CHECK(!communicator.failure().has_value());
  });
  return told;
}

std::string Disagree(World& world, int odd, const Say& usual, const Say& other) {
  return Disagree(world,
                  [&](Saying& saying, int rank) { return (rank == odd ? other : usual)(saying); });
}

}  // namespace sparkdl::tests
