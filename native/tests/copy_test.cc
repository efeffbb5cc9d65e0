// Copies, and the choice between ordinary and streaming stores.
#include "sparkdl/copy.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "check.h"
#include "sparkdl/shm/store_choice.h"
#include "sparkdl/shm/tile_mover.h"
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

TEST(EmptyCopyAcceptsNullPointers) {
  CopyBytes(nullptr, nullptr, 0, Stores::kStreaming);
  CopyBytes(nullptr, nullptr, 0, Stores::kCached);
}

constexpr uint64_t kWork = 7;

// Notes the costs of num_tiles tiles; returns how many of them were moved with streaming stores.
int NumStreaming(StoreChoice& choice, int num_tiles,
                 const std::function<double(Stores, int)>& cost) {
  int streaming = 0;
  for (int tile = 0; tile < num_tiles; ++tile) {
    const Stores stores = choice.current();
    streaming += stores == Stores::kStreaming ? 1 : 0;
    choice.Note(cost(stores, tile), kWork);
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

TEST(OccasionalSlowTilesDoNotChangeTheChoice) {
  StoreChoice choice;
  const auto disturbed = [](Stores stores, int tile) {
    return Near(stores, tile) * (tile % 3 == 0 ? 50.0 : 1.0);
  };
  CHECK(NumStreaming(choice, 10'000, disturbed) < 300);
}

TEST(DisturbedTrialDoesNotHideAChangeOfCosts) {
  StoreChoice choice;
  const auto disturbed = [](Stores stores, int tile) {
    return Near(stores, tile) * (stores == Stores::kStreaming ? 50.0 : 1.0);
  };
  static_cast<void>(NumStreaming(choice, 50'000, disturbed));
  CHECK(NumStreaming(choice, 4'000, Far) > 2'500);
}

TEST(TimesOfOtherWorkDoNotCount) {
  StoreChoice choice;
  for (int tile = 0; tile < 10'000; ++tile) {
    const Stores stores = choice.current();
    const bool is_cheap = tile % 5 == 0;  // such as a barely filled tile among full ones
    choice.Note(Near(stores, tile) * (is_cheap ? 0.1 : 1.0), is_cheap ? kWork + 1 : kWork);
  }
  CHECK(NumStreaming(choice, 1'000, Near) < 100);
}

TEST(ChoiceIsMadeAnewForOtherWork) {
  StoreChoice choice;
  static_cast<void>(NumStreaming(choice, 5'000, Far));
  int streaming = 0;
  for (int tile = 0; tile < 5'000; ++tile) {
    streaming += choice.current() == Stores::kStreaming ? 1 : 0;
    choice.Note(Near(choice.current(), tile), kWork + 1);
  }
  CHECK(streaming < 1'000);
}

TEST(StoresOfEqualCostAreSeldomTried) {
  StoreChoice choice;
  CHECK(NumStreaming(choice, 100'000, [](Stores, int) { return 1.0; }) < 1'000);
}

TEST(MuchSlowerStoresAreSeldomTriedIfTimesVary) {
  StoreChoice choice;
  // As for buffers that come alternately from memory and from a cache.
  const auto unsteady = [](Stores stores, int tile) {
    return (tile / 600 % 2 == 0 ? 1.0 : 1.4) * (stores == Stores::kCached ? 1.0 : 2.5);
  };
  CHECK(NumStreaming(choice, 100'000, unsteady) < 150);
}

TEST(StreamingStoresAreNotUsedForASmallGain) {
  StoreChoice choice;
  const auto little = [](Stores stores, int) { return stores == Stores::kCached ? 1.0 : 0.8; };
  CHECK(NumStreaming(choice, 10'000, little) < 200);
}

constexpr size_t kTileBytes = size_t{100} * 1024;

void MoveTile(TileMovers& movers, TileMovers::Published& published, TileMovers::Tile tile) {
  TileMover mover = movers.Begin(published, tile);
  mover.Start();
  mover.Stop();
  movers.End(mover, published);
}

TEST(LeaderPublishesItsStoresAndOthersFollow) {
  if (!kHasStreamingStores) return;
  using Traffic = TileMovers::Traffic;
  TileMovers leader(true);
  TileMovers follower(false);
  TileMovers::Published published{0};
  const TileMovers::Tile tile{.traffic = Traffic::kGather, .bytes = kTileBytes};
  int num_tiles = 0;
  while (published == 0 && ++num_tiles < 1000) MoveTile(leader, published, tile);
  CHECK(num_tiles < 1000);
  CHECK(follower.Begin(published, tile).stores() == Stores::kStreaming);
  // Not for other sizes, other traffic or small tiles.
  for (const size_t bytes : {size_t{1}, kTileBytes / 2, 2 * kTileBytes}) {
    CHECK(follower.Begin(published, {.traffic = Traffic::kGather, .bytes = bytes}).stores() ==
          Stores::kCached);
  }
  CHECK(follower.Begin(published, {.traffic = Traffic::kReduce, .bytes = kTileBytes}).stores() ==
        Stores::kCached);
}

PeerDistance DistanceAfter(PeerDistance distance, std::initializer_list<int> nanoseconds,
                           int times = 1) {
  for (int time = 0; time < times; ++time) {
    for (const int took : nanoseconds) distance.Note(std::chrono::nanoseconds(took));
  }
  return distance;
}

TEST(PeerWithSlowLinesIsFar) {
  const PeerDistance near;
  CHECK(!near.is_far());
  const PeerDistance far = DistanceAfter(near, {140}, 8);
  CHECK(far.is_far());
  // Lines that were already in the cache say nothing, and a disturbance says little.
  CHECK(DistanceAfter(far, {20, 140, 20, 150}, 1000).is_far());
  CHECK(!DistanceAfter(near, {40, 50, 30, 50, 40, 5000, 50, 30, 50, 40}, 1000).is_far());
  CHECK(!DistanceAfter(far, {50}, 24).is_far());
  CHECK(DistanceAfter(near, {20, 140}, 12).is_far());
}

TEST(NearAndFarPeersHaveSeparateChoices) {
  if (!kHasStreamingStores) return;
  TileMovers leader(true);
  TileMovers::Published published{0};
  const TileMovers::Tile tile{.bytes = kTileBytes};
  const auto lines_take = [&](int nanoseconds) {
    PeerDistance& distance = *leader.DistanceDuring(leader.Begin(published, tile));
    distance = DistanceAfter(distance, {nanoseconds}, 24);
    MoveTile(leader, published, tile);
  };
  int num_tiles = 0;
  while (published == 0 && ++num_tiles < 1000) MoveTile(leader, published, tile);
  CHECK(num_tiles < 1000);
  // A trial for one distance is none for the other, which makes its own.
  lines_take(140);
  CHECK_EQ(published.load(), 0U);
  num_tiles = 0;
  while (published == 0 && ++num_tiles < 1000) MoveTile(leader, published, tile);
  CHECK(num_tiles < 1000);
  // A trial that was broken off does not continue.
  lines_take(50);
  CHECK_EQ(published.load(), 0U);
}

TEST(DistanceIsNotedOnlyForTimedTiles) {
  TileMovers::Published published{0};
  TileMovers follower(false);
  TileMovers leader(true);
  const auto notes = [&](TileMovers& movers, size_t bytes) {
    return movers.DistanceDuring(movers.Begin(published, {.bytes = bytes})) != nullptr;
  };
  CHECK(!notes(follower, kTileBytes));
  CHECK(!notes(leader, TileMovers::kSmallest));
  CHECK_EQ(notes(leader, kTileBytes), kHasStreamingStores);
}

TEST(OnlyTheLeaderMeasuresAndOnlyLargeTilesThatGoBothWays) {
  TileMovers::Published published{0};
  TileMovers follower(false);
  TileMovers leader(true);
  for (int tile = 0; tile < 1000; ++tile) {
    MoveTile(follower, published, {.bytes = kTileBytes});
    MoveTile(leader, published, {.bytes = TileMovers::kSmallest});
    MoveTile(leader, published, {.bytes = kTileBytes, .goes_both_ways = false});
  }
  CHECK_EQ(published.load(), 0U);
}

TEST(CollectivesAreRightWithStreamingStores) {
  // Three rounds through the slots.
  constexpr size_t kCount =
      3 * size_t{Segment::kSlotsPerRank} * Segment::kSlotBytes / sizeof(float) + 3;
  for (const auto& hosts : {std::vector{0, 0}, std::vector{0, 0, 0}}) {
    World world(hosts);
    std::shared_ptr<Segment> segment = world.options(0).segment;
    world.OpenAll();
    std::atomic<bool> is_over{false};
    // Ranks notice a change at different tiles, and move these with different stores.
    std::thread changes([&] {
      for (uint32_t time = 0; !is_over; ++time) {
        segment->line(0).streaming = time % 4 == 0 ? 0 : ~uint32_t{0};
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    });
    world.Run([](Communicator& communicator, int) {
      const Trials trials(communicator);
      for (const size_t count : {size_t{5000}, size_t{20'000}, kCount}) {
        RunTrial(communicator, trials.AllReduce({}, count));
        RunTrial(communicator, trials.Reduce({}, count, 1));
        RunTrial(communicator, trials.ReduceScatter({Dtype::kBfloat16}, count));
        RunTrial(communicator, trials.AllGather(Dtype::kFloat32, count));
        RunTrial(communicator, trials.Broadcast(Dtype::kFloat32, count, 1));
        RunTrial(communicator, trials.AllToAll(Dtype::kFloat32, count));
      }
    });
    is_over = true;
    changes.join();
  }
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
