// Byte streams that consist of several pieces of memory.
#ifndef SPARKDL_PIECES_H_
#define SPARKDL_PIECES_H_

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

namespace sparkdl {

// Contiguous bytes. In a destination, null data means that these bytes of the stream are skipped.
template <typename Byte>
struct BasicPiece {
  Byte* data = nullptr;
  size_t bytes = 0;
};
using Piece = BasicPiece<std::byte>;
using ConstPiece = BasicPiece<const std::byte>;
using Pieces = std::vector<Piece>;
using ConstPieces = std::vector<ConstPiece>;

template <typename Byte>
size_t TotalBytes(const std::vector<BasicPiece<Byte>>& pieces) {
  size_t total = 0;
  for (const auto& piece : pieces) total += piece.bytes;
  return total;
}

// A position in such a stream. The pieces must outlive the cursor.
template <typename Byte>
class PieceCursor {
 public:
  PieceCursor() = default;
  explicit PieceCursor(const std::vector<BasicPiece<Byte>>& pieces)
      : pieces_(pieces), remaining_(TotalBytes(pieces)) {
    SkipEmpty();
  }

  size_t remaining() const { return remaining_; }

  // Contiguous bytes at the position, at most `longest` of them. Unless longest is 0, empty only at
  // the end.
  BasicPiece<Byte> Peek(size_t longest) const {
    if (remaining_ == 0) return {};
    const auto& piece = pieces_[index_];
    return {piece.data == nullptr ? nullptr : piece.data + offset_,
            std::min(piece.bytes - offset_, longest)};
  }

  // Moves forward by this number of bytes, possibly across pieces.
  void Advance(size_t bytes) {
    remaining_ -= bytes;
    offset_ += bytes;
    while (index_ < pieces_.size() && offset_ >= pieces_[index_].bytes) {
      offset_ -= pieces_[index_].bytes;
      ++index_;
    }
  }

 private:
  void SkipEmpty() { Advance(0); }

  std::span<const BasicPiece<Byte>> pieces_;
  size_t index_ = 0;
  size_t offset_ = 0;
  size_t remaining_ = 0;
};

// Bytes [begin, begin + bytes) of a stream, which must be at least that long.
template <typename Byte>
std::vector<BasicPiece<Byte>> Slice(const std::vector<BasicPiece<Byte>>& pieces, size_t begin,
                                    size_t bytes) {
  std::vector<BasicPiece<Byte>> slice;
  PieceCursor<Byte> cursor(pieces);
  cursor.Advance(begin);
  while (bytes > 0) {
    slice.push_back(cursor.Peek(bytes));
    bytes -= slice.back().bytes;
    cursor.Advance(slice.back().bytes);
  }
  return slice;
}

inline void Append(ConstPieces& stream, const Pieces& pieces) {
  for (const Piece& piece : pieces) stream.push_back({piece.data, piece.bytes});
}
inline void Append(ConstPieces& stream, const ConstPieces& pieces) {
  stream.insert(stream.end(), pieces.begin(), pieces.end());
}
inline void Append(Pieces& stream, const Pieces& pieces) {
  stream.insert(stream.end(), pieces.begin(), pieces.end());
}

// Part number `index` of `total`, divided as evenly as possible into `parts`, at multiples of
// `unit`.
struct Part {
  size_t begin = 0;
  size_t size = 0;
};
inline Part PartOf(size_t total, size_t parts, size_t index, size_t unit = 1) {
  const size_t per_part = (total + parts - 1) / parts;
  const size_t stride = (per_part + unit - 1) / unit * unit;
  const size_t begin = std::min(stride * index, total);
  return {begin, std::min(stride, total - begin)};
}

}  // namespace sparkdl

#endif  // SPARKDL_PIECES_H_
