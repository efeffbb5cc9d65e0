// Arrays whose elements are not contiguous in memory.
#include "sparkdl/strided.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "check.h"

namespace sparkdl::tests {
namespace {

template <typename T>
void CheckRoundTrip(std::vector<size_t> shape, std::vector<int64_t> strides, size_t first,
                    const std::vector<T>& expected) {
  std::vector<T> memory(60);
  std::iota(memory.begin(), memory.end(), T{0});
  const StridedArray array{.data = reinterpret_cast<std::byte*>(memory.data() + first),
                           .element_bytes = sizeof(T),
                           .shape = std::move(shape),
                           .strides = std::move(strides)};
  std::vector<T> packed(expected.size());
  Pack(array, reinterpret_cast<std::byte*>(packed.data()));
  CHECK(packed == expected);
  // Elements that do not belong to the array remain unchanged.
  std::vector<T> wanted = memory;
  for (T& element : packed) {
    wanted[static_cast<size_t>(element)] = static_cast<T>(element + 60);
    element = static_cast<T>(element + 60);
  }
  Unpack(reinterpret_cast<const std::byte*>(packed.data()), array);
  CHECK(memory == wanted);
}

TEST(ElementsArePackedInRowMajorOrderAndPutBack) {
  CheckRoundTrip<int8_t>({3, 2}, {1, 3}, 0, {0, 3, 1, 4, 2, 5});
  CheckRoundTrip<int16_t>({4}, {5}, 2, {2, 7, 12, 17});
  CheckRoundTrip<int32_t>({4}, {-2}, 9, {9, 7, 5, 3});
  CheckRoundTrip<int64_t>({2, 2, 2}, {20, 1, -4}, 8, {8, 4, 9, 5, 28, 24, 29, 25});
  CheckRoundTrip<float>({2, 3}, {10, 1}, 0, {0, 1, 2, 10, 11, 12});
}

// Compared with a plain loop over the indices.
TEST(PermutedArraysWithGapsArePackedWhateverTheirSize) {
  constexpr size_t kExtents[] = {37, 3, 70};
  std::vector<int32_t> memory(size_t{2} * 37 * 3 * 70);
  std::iota(memory.begin(), memory.end(), 0);
  std::vector<size_t> order = {0, 1, 2};
  do {
    for (const int64_t gap : {1, 2}) {
      const int64_t strides[] = {210 * gap, 70 * gap, gap};
      StridedArray array{.data = reinterpret_cast<std::byte*>(memory.data()),
                         .element_bytes = 4,
                         .shape = {},
                         .strides = {}};
      for (const size_t axis : order) {
        array.shape.push_back(kExtents[axis]);
        array.strides.push_back(strides[axis]);
      }
      std::vector<int32_t> expected;
      for (size_t i = 0; i < array.shape[0]; ++i) {
        for (size_t j = 0; j < array.shape[1]; ++j) {
          for (size_t k = 0; k < array.shape[2]; ++k) {
            expected.push_back(memory[i * static_cast<size_t>(array.strides[0]) +
                                      j * static_cast<size_t>(array.strides[1]) +
                                      k * static_cast<size_t>(array.strides[2])]);
          }
        }
      }
      std::vector<int32_t> packed(expected.size());
      Pack(array, reinterpret_cast<std::byte*>(packed.data()));
      CHECK(packed == expected);
      const std::vector<int32_t> before = memory;
      for (const int32_t element : packed) memory[static_cast<size_t>(element)] = -1;
      Unpack(reinterpret_cast<const std::byte*>(packed.data()), array);
      CHECK(memory == before);
    }
  } while (std::ranges::next_permutation(order).found);
}

TEST(ArraysOfOneElementOrNoneArePacked) {
  CheckRoundTrip<int32_t>({}, {}, 7, {7});
  CheckRoundTrip<int32_t>({1, 1}, {100, 100}, 7, {7});
  CheckRoundTrip<int32_t>({0, 3}, {1, 1}, 0, {});
  CheckRoundTrip<int32_t>({3, 0}, {1, 1}, 0, {});
}

TEST(ElementsThatShareMemoryAreFound) {
  const auto overlaps = [](std::vector<size_t> shape, std::vector<int64_t> strides) {
    return MayOverlap({.data = nullptr,
                       .element_bytes = 4,
                       .shape = std::move(shape),
                       .strides = std::move(strides)});
  };
  CHECK(overlaps({3}, {0}));
  CHECK(overlaps({3, 4}, {0, 1}));
  CHECK(overlaps({3, 4}, {1, 1}));
  CHECK(overlaps({3, 4}, {3, -1}));
  CHECK(!overlaps({3, 4}, {4, 1}));
  CHECK(!overlaps({3, 4}, {1, 3}));
  CHECK(!overlaps({3, 4}, {-8, 2}));
  CHECK(!overlaps({1, 4}, {0, 2}));
  CHECK(!overlaps({0, 4}, {0, 0}));
  CHECK(!overlaps({}, {}));
}

}  // namespace
}  // namespace sparkdl::tests

TEST_MAIN()
