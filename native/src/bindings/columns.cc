#include "bindings/columns.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "bindings/errors.h"

namespace sparkdl::bindings {
namespace {

namespace nb = nanobind;

using Column = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Side length, in elements, of the squares that are copied at once: their part of the matrix stays
// in the first-level cache until its rows are complete.
constexpr size_t kSquare = 64;

template <size_t kBytes>
void Join(const std::vector<const std::byte*>& columns, size_t num_rows, std::byte* matrix) {
  const size_t width = columns.size();
  for (size_t row = 0; row < num_rows; row += kSquare) {
    const size_t last_row = std::min(row + kSquare, num_rows);
    for (size_t column = 0; column < width; column += kSquare) {
      const size_t last_column = std::min(column + kSquare, width);
      for (size_t j = column; j < last_column; ++j) {
        const std::byte* from = columns[j] + row * kBytes;
        std::byte* to = matrix + (row * width + j) * kBytes;
        for (size_t i = row; i < last_row; ++i) {
          std::memcpy(to, from, kBytes);
          from += kBytes;
          to += width * kBytes;
        }
      }
    }
  }
}

void JoinColumns(const std::vector<Column>& columns, const Matrix& matrix) {
  const size_t num_rows = matrix.shape(0);
  const size_t bytes = matrix.itemsize();
  if (columns.size() != matrix.shape(1)) {
    RaiseInvalid("The matrix has " + std::to_string(matrix.shape(1)) + " columns, and " +
                 std::to_string(columns.size()) + " are given.");
  }
  std::vector<const std::byte*> starts;
  starts.reserve(columns.size());
  for (const Column& column : columns) {
    if (column.shape(0) != num_rows || column.dtype() != matrix.dtype()) {
      RaiseInvalid("The columns differ from the matrix in rows or dtype.");
    }
    starts.push_back(static_cast<const std::byte*>(column.data()));
  }
  auto* const to = static_cast<std::byte*>(matrix.data());
  const nb::gil_scoped_release release;
  if (bytes == 1) Join<1>(starts, num_rows, to);
  if (bytes == 2) Join<2>(starts, num_rows, to);
  if (bytes == 4) Join<4>(starts, num_rows, to);
  if (bytes == 8) Join<8>(starts, num_rows, to);
}

}  // namespace

void DefineJoinColumns(nb::module_& module) {
  using nb::literals::operator""_a;
  module.def("join_columns", &JoinColumns, "columns"_a, "matrix"_a.noconvert(),
             nb::sig("def join_columns(columns: Sequence[object], matrix: object) -> None"),
             "Write arrays of one dimension into the columns of a C-contiguous matrix of their "
             "dtype, without the GIL.");
}

}  // namespace sparkdl::bindings
