// Arrays whose elements are not contiguous in memory.
#ifndef SPARKDL_STRIDED_H_
#define SPARKDL_STRIDED_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace sparkdl {

// Positions of the elements. A stride is in elements, and may be negative.
struct StridedArray {
  std::byte* data = nullptr;
  size_t element_bytes = 0;
  std::vector<size_t> shape;
  std::vector<int64_t> strides;
};

// Whether elements may share memory. False is certain. True may be wrong for a few arrays that no
// library creates by slicing and permuting.
bool MayOverlap(const StridedArray& array);

// Copies the elements to contiguous memory in row-major order (Pack), or from there (Unpack). The
// two must not overlap.
void Pack(const StridedArray& array, std::byte* packed);
void Unpack(const std::byte* packed, const StridedArray& array);

// Contiguous memory that replaces an array while an operation works on it.
struct PackedArray {
  StridedArray array;
  std::unique_ptr<std::byte[]> elements;
  bool is_read = false;
  bool is_written = false;

  void BeforeOperation() const {
    if (is_read) Pack(array, elements.get());
  }
  void AfterOperation() const {
    if (is_written) Unpack(elements.get(), array);
  }
};

}  // namespace sparkdl

#endif  // SPARKDL_STRIDED_H_
