#include "sparkdl/strided.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <span>
#include <utility>

namespace sparkdl {
namespace {

// Side length, in elements, of the squares in which two axes are exchanged: the cache lines of both
// sides of a square stay in the first-level cache.
constexpr size_t kSquare = 32;

// Steps are in bytes.
struct Axis {
  size_t count = 1;
  ptrdiff_t array_step = 0;
  ptrdiff_t packed_step = 0;
};

// Axes with more than one element, in row-major order; neighbouring axes that can be merged are
// merged.
std::vector<Axis> AxesOf(const StridedArray& array) {
  std::vector<Axis> axes;
  auto packed_step = static_cast<ptrdiff_t>(array.element_bytes);
  for (size_t i = array.shape.size(); i-- > 0;) {
    const size_t count = array.shape[i];
    if (count == 1) continue;
    const ptrdiff_t step = array.strides[i] * static_cast<ptrdiff_t>(array.element_bytes);
    if (!axes.empty() &&
        step == axes.back().array_step * static_cast<ptrdiff_t>(axes.back().count)) {
      axes.back().count *= count;
    } else {
      axes.push_back({.count = count, .array_step = step, .packed_step = packed_step});
    }
    packed_step *= static_cast<ptrdiff_t>(count);
  }
  std::ranges::reverse(axes);
  return axes;
}

enum class Direction : uint8_t { kPack, kUnpack };

template <Direction kDirection>
void CopyElement(std::byte* array, std::byte* packed, size_t bytes) {
  if constexpr (kDirection == Direction::kPack) {
    std::memcpy(packed, array, bytes);
  } else {
    std::memcpy(array, packed, bytes);
  }
}

template <Direction kDirection, size_t kBytes>
void CopyPlane(std::byte* array, std::byte* packed, const Axis& outer, const Axis& inner) {
  for (size_t row = 0; row < outer.count; row += kSquare) {
    const size_t last_row = std::min(row + kSquare, outer.count);
    for (size_t column = 0; column < inner.count; column += kSquare) {
      const size_t last_column = std::min(column + kSquare, inner.count);
      for (size_t i = row; i < last_row; ++i) {
        const auto y = static_cast<ptrdiff_t>(i);
        const auto x = static_cast<ptrdiff_t>(column);
        std::byte* in_array = array + y * outer.array_step + x * inner.array_step;
        std::byte* in_packed = packed + y * outer.packed_step + x * inner.packed_step;
        for (size_t j = column; j < last_column; ++j) {
          CopyElement<kDirection>(in_array, in_packed, kBytes);
          in_array += inner.array_step;
          in_packed += inner.packed_step;
        }
      }
    }
  }
}

// Calls visit with the positions at which each element of the outer axes begins.
template <typename Visit>
void ForEach(std::span<const Axis> axes, std::byte* array, std::byte* packed, const Visit& visit) {
  if (axes.empty()) {
    visit(array, packed);
    return;
  }
  const Axis& axis = axes.front();
  for (size_t i = 0; i < axis.count; ++i) {
    ForEach(axes.subspan(1), array, packed, visit);
    array += axis.array_step;
    packed += axis.packed_step;
  }
}

template <Direction kDirection>
void Copy(const StridedArray& strided, std::byte* packed) {
  if (std::ranges::find(strided.shape, size_t{0}) != strided.shape.end()) return;
  const size_t bytes = strided.element_bytes;
  std::vector<Axis> axes = AxesOf(strided);
  Axis inner;
  if (!axes.empty()) {
    inner = axes.back();
    axes.pop_back();
  }
  if (inner.array_step == static_cast<ptrdiff_t>(bytes) || inner.count == 1) {
    ForEach(axes, strided.data, packed, [&](std::byte* array_row, std::byte* packed_row) {
      CopyElement<kDirection>(array_row, packed_row, inner.count * bytes);
    });
    return;
  }
  // Combined with the axis along which the array's elements lie closest.
  Axis outer;
  const auto closest = std::ranges::min_element(
      axes, {}, [](const Axis& axis) { return std::abs(axis.array_step); });
  if (closest != axes.end()) {
    outer = *closest;
    axes.erase(closest);
  }
  const auto copy = [&]<size_t kBytes>() {
    ForEach(axes, strided.data, packed, [&](std::byte* array_plane, std::byte* packed_plane) {
      CopyPlane<kDirection, kBytes>(array_plane, packed_plane, outer, inner);
    });
  };
  if (bytes == 1) copy.template operator()<1>();
  if (bytes == 2) copy.template operator()<2>();
  if (bytes == 4) copy.template operator()<4>();
  if (bytes == 8) copy.template operator()<8>();
}

}  // namespace

bool MayOverlap(const StridedArray& array) {
  std::vector<std::pair<uint64_t, size_t>> axes;
  for (size_t axis = 0; axis < array.shape.size(); ++axis) {
    if (array.shape[axis] == 0) return false;
    if (array.shape[axis] == 1) continue;
    axes.emplace_back(std::abs(array.strides[axis]), array.shape[axis]);
  }
  std::ranges::sort(axes);
  // There is no overlap if each step goes beyond everything that the smaller steps reach.
  uint64_t reach = 0;
  for (const auto& [stride, extent] : axes) {
    if (stride <= reach) return true;
    reach += stride * (extent - 1);
  }
  return false;
}

void Pack(const StridedArray& array, std::byte* packed) { Copy<Direction::kPack>(array, packed); }

void Unpack(const std::byte* packed, const StridedArray& array) {
  Copy<Direction::kUnpack>(array, const_cast<std::byte*>(packed));
}

}  // namespace sparkdl
