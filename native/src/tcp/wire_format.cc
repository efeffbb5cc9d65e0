#include "sparkdl/tcp/wire_format.h"

#include <array>

namespace sparkdl {

const WireFormat* WireFormat::Find(Dtype wire) {
  static const WireFormat bfloat16(Dtype::kBfloat16);
  static const WireFormat float16(Dtype::kFloat16);
  if (wire == Dtype::kBfloat16) return &bfloat16;
  if (wire == Dtype::kFloat16) return &float16;
  return nullptr;
}

void WireFormat::Round(const Pieces& values) const {
  std::array<std::byte, 4096> packed;
  PieceCursor<std::byte> cursor(values);
  while (cursor.remaining() > 0) {
    const Piece piece = cursor.Peek(packed.size() / bytes() * sizeof(float));
    Pack(packed.data(), piece.data, piece.bytes / sizeof(float));
    Unpack(piece.data, packed.data(), piece.bytes / sizeof(float));
    cursor.Advance(piece.bytes);
  }
}

}  // namespace sparkdl
