// Copies, and the choice of how they store.
#include "sparkdl/copy.h"

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <vector>

#include "check.h"
#include "sparkdl/store_choice.h"
#include "trial.h"
#include "world.h"

namespace sparkdl::tests {
namespace {

TEST(CopiesOfAllLengthsAndAddressesAreExact) {
  constexpr size_t kMargin = 80;
  std::vector<unsigned char> source(1000);
  std::iota(source.begin(), source.end(), static_cast<unsigned char>(0));
  for (const Stores stores : {Stores::kCached, Stores::kStreaming}) {
    for (const size_t bytes : {0, 1, 15, 63, 64, 65, 127, 128, 129, 200, 511, 640}) {
      for (size_t from = 0; from < 17; ++from) {
        for (size_t to = 0; to < 66; ++to) {
          std::vector<unsigned char> destination(kMargin + bytes + kMargin, 255);
          CopyBytes(destination.data() + to, source.data() + from, bytes, stores);
          FinishCopies(stores);
          CHECK(std::equal(source.begin() + from, source.begin() + from + bytes,
                           destination.begin() + to));
          CHECK(std::all_of(destination.begin(), destination.begin() + to,
                            [](unsigned char byte) { return byte == 255; }));
          CHECK(std::all_of(destination.begin() + to + bytes, destination.end(),
                            [](unsigned char byte) { return byte == 255; }));
        }
      }
    }
  }
}

TEST(CopyOfNothingMayBeFromAndToNull) {
  CopyBytes(nullptr, nullptr, 0, Stores::kStreaming);
  CopyBytes(nullptr, nullptr, 0, Stores::kCached);
}

// The costs of so many tiles, and how many of them were moved with streaming stores.
int NumStreaming(StoreChoice& choice, int num_tiles,
                 const std::function<double(Stores, int)>& cost) {
  int streaming = 0;
  for (int tile = 0; tile < num_tiles; ++tile) {
    const Stores stores = choice.current();
    streaming += stores == Stores::kStreaming ? 1 : 0;
    choice.Note(cost(stores, tile));
  }
  return streaming;
}

double Near(Stores stores, int /*tile*/) { return stores == Stores::kCached ? 1.0 : 1.6; }
double Far(Stores stores, int /*tile*/) { return stores == Stores::kCached ? 4.0 : 1.2; }

TEST(CheaperStoresAreUsedForAllButAFewTiles) {
  StoreChoice near;
  CHECK(NumStreaming(near, 10'000, Near) < 200);
  StoreChoice far;
  CHECK(NumStreaming(far, 100, Far) > 70);
  CHECK(NumStreaming(far, 10'000, Far) > 9'800);
}

TEST(ChangeOfCostsIsNoticed) {
  StoreChoice choice;
  static_cast<void>(NumStreaming(choice, 50'000, Near));
  CHECK(NumStreaming(choice, 4'000, Far) > 2'500);
  CHECK(NumStreaming(choice, 50'000, Far) > 49'000);
  CHECK(NumStreaming(choice, 4'000, Near) < 1'500);
}

TEST(TilesThatTakeLongOnceDoNotChangeTheChoice) {
  StoreChoice choice;
  const auto disturbed = [](Stores stores, int tile) {
    return Near(stores, tile) * (tile % 3 == 0 ? 50.0 : 1.0);
  };
  CHECK(NumStreaming(choice, 10'000, disturbed) < 300);
}

TEST(StoresThatDoNotMatterAreSeldomTried) {
  StoreChoice choice;
  CHECK(NumStreaming(choice, 100'000, [](Stores, int) { return 1.0; }) < 500);
}

// Long enough that the other stores are tried on the way.
TEST(CollectivesAreRightWhicheverStoresAreUsed) {
  constexpr size_t kCount = 40 * Segment::kSlotBytes / sizeof(float) + 3;
  for (const auto& hosts : {std::vector{0, 0}, std::vector{0, 0, 0}}) {
    World world(hosts);
    world.OpenAll();
    world.Run([](Communicator& communicator, int) {
      const Trials trials(communicator);
      RunTrial(communicator, trials.AllReduce({}, kCount));
      RunTrial(communicator, trials.Reduce({}, kCount, 1));
      RunTrial(communicator, trials.ReduceScatter({}, kCount / 2));
      RunTrial(communicator, trials.AllGather(Dtype::kFloat32, kCount));
      RunTrial(communicator, trials.AllToAll(Dtype::kFloat32, kCount / 2));
    });
  }
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
