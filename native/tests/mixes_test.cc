// Random operations one after another, synchronous and queued, from one thread and from several.
#include <deque>
#include <iterator>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "trial.h"
#include "world.h"

namespace sparkdl::tests {
namespace {

std::vector<Counts> GroupCounts(int world_size, size_t count) {
  return {UnevenCounts(world_size, count), Counts(static_cast<size_t>(world_size), count / 3)};
}

// A random operation, with sizes from zero to several tiles; the same on every rank.
Trial SomeTrial(std::mt19937& random, const Trials& trials, int world_size) {
  const auto below = [&](size_t end) { return static_cast<size_t>(random() % end); };
  const Dtype dtype = kDtypes[below(std::size(kDtypes) - 1)];  // not bool, which has no average
  const Trials::Numbers numbers{dtype, kReduceOps[below(5)]};
  const size_t count = below(4) == 0 ? below(90'000) : below(700);
  const auto root = static_cast<int>(below(static_cast<size_t>(world_size)));
  const Counts counts = below(2) == 0 ? Counts{} : UnevenCounts(world_size, count);
  switch (below(11)) {
    case 0:
      return trials.AllReduce(numbers, count);
    case 1:
      return trials.AllReduceGroup(numbers, {count, below(3), below(5000)});
    case 2:
      return trials.Reduce(numbers, count, root);
    case 3:
      return trials.ReduceScatter(numbers, count, counts);
    case 4:
      return trials.AllGather(dtype, count, counts, Place::kInside);
    case 5:
      return trials.Gather(dtype, count, root, counts);
    case 6:
      return trials.Scatter(dtype, count, root, counts);
    case 7:
      return trials.AllToAll(dtype, [&](int from, int to) {
        return count * static_cast<size_t>((from + 2 * to) % 3) / 2;
      });
    case 8:
      return trials.ReduceScatterGroup(numbers, GroupCounts(world_size, count));
    case 9:
      return trials.AllGatherGroup(dtype, GroupCounts(world_size, count));
    default:
      return trials.Broadcast(dtype, count, root);
  }
}

TEST(MixesOfEverythingSynchronousAndQueuedAreRight) {
  for (const auto& hosts : Topologies()) {
    World world(hosts);
    world.OpenAll();
    world.Run([](Communicator& communicator, int rank) {
      // NOLINTNEXTLINE(bugprone-random-generator-seed): all ranks follow the same script
      std::mt19937 script(7);
      // Each rank decides by itself when to wait.
      std::mt19937 own(static_cast<unsigned>(rank));
      std::deque<std::pair<Trial, std::shared_ptr<PendingOperation>>> pending;
      const auto finish_first = [&] {
        const auto& [trial, operation] = pending.front();
        trial.Check(Communicator::Wait(*operation, kTimeout, nullptr));
        pending.pop_front();
      };
      const Trials trials(communicator);
      for (int i = 0; i < 150; ++i) {
        Trial trial = SomeTrial(script, trials, communicator.world_size());
        if (own() % 3 == 0) {
          RunTrial(communicator, trial);
        } else {
          auto operation = communicator.Submit(trial.operation, kTimeout);
          pending.emplace_back(std::move(trial), std::move(operation));
        }
        while (!pending.empty() && own() % 4 == 0) finish_first();
      }
      while (!pending.empty()) finish_first();
    });
  }
}

TEST(ThreadsOfARankMayShareItsCommunicator) {
  World world({0, 0, 1});
  world.OpenAll();
  world.Run([](Communicator& communicator, int) {
    // All operations are the same, so their order does not matter.
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 3; ++thread) {
      threads.emplace_back([&, thread] {
        for (int i = 0; i < 60; ++i) {
          const Trial trial = Trials(communicator).AllReduce({}, 1000);
          if ((i + thread) % 2 == 0) {
            RunTrial(communicator, trial);
          } else {
            const auto pending = communicator.Submit(trial.operation, kTimeout);
            trial.Check(Communicator::Wait(*pending, kTimeout, nullptr));
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
