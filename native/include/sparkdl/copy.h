// Copying bytes.
#ifndef SPARKDL_COPY_H_
#define SPARKDL_COPY_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace sparkdl {

// memcpy that takes null pointers with no bytes, which memcpy itself may not be given. The ranges
// must not overlap, unless they are the same.
inline void CopyBytes(void* destination, const void* source, size_t bytes) {
  if (bytes != 0 && destination != source) std::memcpy(destination, source, bytes);
}

// How copies write: as usual, which leaves the data in this core's cache, or around all caches, so
// that who reads it on another core has it from memory.
enum class Stores : uint8_t { kCached, kStreaming };

// Whether this machine has streaming stores; without them kStreaming does what kCached does.
extern const bool kHasStreamingStores;

// Before other threads may read what was copied with kStreaming, FinishCopies() must be called.
void CopyBytes(void* destination, const void* source, size_t bytes, Stores stores);
void FinishCopies(Stores stores);

}  // namespace sparkdl

#endif  // SPARKDL_COPY_H_
