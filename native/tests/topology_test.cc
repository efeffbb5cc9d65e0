// Placement of the ranks on hosts and lanes.
#include "sparkdl/topology.h"

#include "check.h"

namespace sparkdl::tests {
namespace {

TEST(InterleavedHostsAreSeparated) {
  auto made = Topology::Make(3, {0, 1, 0, 1, 0});
  CHECK_OK(made.status());
  const Topology& topology = made.value();
  CHECK_EQ(topology.host(), 1);
  CHECK_EQ(topology.local_rank(), 1);
  CHECK_EQ(topology.local_size(), 2);
  CHECK_EQ(topology.num_lanes(), 2);
  CHECK(topology.owns_lane());
  CHECK_EQ(topology.next_on_lane(), 2);
  CHECK_EQ(topology.previous_on_lane(), 2);
  CHECK_EQ(topology.next_rank(), 4);
}

TEST(RankBeyondTheLanesOwnsNoLane) {
  CHECK(!Topology::Make(2, {0, 0, 0, 1}).value().owns_lane());
  CHECK(Topology::Make(0, {0, 0, 0, 1}).value().owns_lane());
  CHECK(!Topology::Make(0, {0, 0}).value().owns_lane());
}

TEST(HostsMustBeNumberedByFirstAppearance) {
  const auto made = Topology::Make(0, {0, 2});
  CHECK(!made.ok());
  CHECK_CONTAINS(made.status().ToString(), "rank 1 is on host 2 after 1 hosts");
  CHECK_CONTAINS(Topology::Make(2, {0, 0}).status().ToString(), "rank 2 is outside a world of 2");
  CHECK(!Topology::Make(0, {}).ok());
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
