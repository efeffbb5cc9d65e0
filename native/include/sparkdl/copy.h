// Copying bytes.
#ifndef SPARKDL_COPY_H_
#define SPARKDL_COPY_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace sparkdl {

// memcpy that accepts null pointers if bytes is 0, which memcpy itself does not. The ranges must
// not overlap, unless they are identical.
inline void CopyBytes(void* destination, const void* source, size_t bytes) {
  if (bytes != 0 && destination != source) std::memcpy(destination, source, bytes);
}

// How copies write: with ordinary stores, which leave the data in this core's cache, or with
// streaming stores, which bypass all caches, so that another core reads the data from memory.
enum class Stores : uint8_t { kCached, kStreaming };

// Whether this machine has streaming stores. Without them kStreaming does the same as kCached.
extern const bool kHasStreamingStores;

// After a copy with kStreaming, FinishCopies() must be called before other threads may read the
// data.
void CopyBytes(void* destination, const void* source, size_t bytes, Stores stores);
void FinishCopies(Stores stores);

}  // namespace sparkdl

#endif  // SPARKDL_COPY_H_
