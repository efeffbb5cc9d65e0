#include "sparkdl/copy.h"

#include <algorithm>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace sparkdl {
namespace {

#if defined(__x86_64__)

constexpr bool kStreams = true;
constexpr size_t kLine = 64;

// Streaming stores that fill a cache line only partially are slower than ordinary ones, so they are
// used only for the whole lines within the range.
void StreamBytes(std::byte* destination, const std::byte* source, size_t bytes) {
  const size_t before = -reinterpret_cast<uintptr_t>(destination) % kLine;
  const size_t head = std::min(before, bytes);
  CopyBytes(destination, source, head);
  size_t done = head;
  for (; done + kLine <= bytes; done += kLine) {
    const auto* from = reinterpret_cast<const __m128i*>(source + done);
    auto* to = reinterpret_cast<__m128i*>(destination + done);
    const __m128i first = _mm_loadu_si128(from);
    const __m128i second = _mm_loadu_si128(from + 1);
    const __m128i third = _mm_loadu_si128(from + 2);
    const __m128i fourth = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, first);
    _mm_stream_si128(to + 1, second);
    _mm_stream_si128(to + 2, third);
    _mm_stream_si128(to + 3, fourth);
  }
  CopyBytes(destination + done, source + done, bytes - done);
}

void FinishStreaming() { _mm_sfence(); }

#else

constexpr bool kStreams = false;

void StreamBytes(std::byte* destination, const std::byte* source, size_t bytes) {
  CopyBytes(destination, source, bytes);
}

void FinishStreaming() {}

#endif

}  // namespace

const bool kHasStreamingStores = kStreams;

void CopyBytes(void* destination, const void* source, size_t bytes, Stores stores) {
  if (stores == Stores::kCached) {
    CopyBytes(destination, source, bytes);
  } else if (destination != source) {
    StreamBytes(static_cast<std::byte*>(destination), static_cast<const std::byte*>(source), bytes);
  }
}

void FinishCopies(Stores stores) {
  if (stores == Stores::kStreaming) FinishStreaming();
}

}  // namespace sparkdl
