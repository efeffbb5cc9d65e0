#include "sparkdl/strided.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace sparkdl {
namespace {

// An element of that many bytes for the compiler, which makes one instruction of its copy.
template <size_t kBytes>
void CopyRow(std::byte* to, ptrdiff_t to_step, const std::byte* from, ptrdiff_t from_step,
             size_t count) {
  for (size_t i = 0; i < count; ++i, to += to_step, from += from_step) {
    std::memcpy(to, from, kBytes);
  }
}

using RowCopy = void (*)(std::byte*, ptrdiff_t, const std::byte*, ptrdiff_t, size_t);

RowCopy RowCopyFor(size_t element_bytes) {
  switch (element_bytes) {
    case 1:
      return CopyRow<1>;
    case 2:
      return CopyRow<2>;
    case 4:
      return CopyRow<4>;
    default:
      return CopyRow<8>;
  }
}

// Calls visit with the first element of every row, which is a run along the last axis.
template <typename Visit>
void ForEachRow(const StridedArray& array, const Visit& visit) {
  if (std::ranges::find(array.shape, size_t{0}) != array.shape.end()) return;
  const size_t num_axes = array.shape.empty() ? 0 : array.shape.size() - 1;
  std::vector<size_t> index(num_axes);
  std::byte* row = array.data;
  while (true) {
    visit(row);
    size_t axis = num_axes;
    for (; axis > 0; --axis) {
      const size_t last = axis - 1;
      const ptrdiff_t step = array.strides[last] * static_cast<ptrdiff_t>(array.element_bytes);
      row += step;
      if (++index[last] < array.shape[last]) break;
      row -= step * static_cast<ptrdiff_t>(array.shape[last]);
      index[last] = 0;
    }
    if (axis == 0) return;
  }
}

struct Row {
  size_t count = 1;
  ptrdiff_t step = 0;
};

Row RowOf(const StridedArray& array) {
  if (array.shape.empty()) return {};
  return {.count = array.shape.back(),
          .step = array.strides.back() * static_cast<ptrdiff_t>(array.element_bytes)};
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
  // Each step goes beyond all that the smaller ones reach.
  uint64_t reach = 0;
  for (const auto& [stride, extent] : axes) {
    if (stride <= reach) return true;
    reach += stride * (extent - 1);
  }
  return false;
}

void Pack(const StridedArray& from, std::byte* to) {
  const Row row = RowOf(from);
  const auto step = static_cast<ptrdiff_t>(from.element_bytes);
  const RowCopy copy = RowCopyFor(from.element_bytes);
  ForEachRow(from, [&](const std::byte* first) {
    copy(to, step, first, row.step, row.count);
    to += step * static_cast<ptrdiff_t>(row.count);
  });
}

void Unpack(const std::byte* from, const StridedArray& to) {
  const Row row = RowOf(to);
  const auto step = static_cast<ptrdiff_t>(to.element_bytes);
  const RowCopy copy = RowCopyFor(to.element_bytes);
  ForEachRow(to, [&](std::byte* first) {
    copy(first, row.step, from, step, row.count);
    from += step * static_cast<ptrdiff_t>(row.count);
  });
}

}  // namespace sparkdl
