// Copying bytes.
#ifndef SPARKDL_COPY_H_
#define SPARKDL_COPY_H_

#include <cstddef>
#include <cstring>

namespace sparkdl {

// memcpy that takes null pointers with no bytes, which memcpy itself may not be given. The ranges
// must not overlap, unless they are the same.
inline void CopyBytes(void* destination, const void* source, size_t bytes) {
  if (bytes != 0 && destination != source) std::memcpy(destination, source, bytes);
}

}  // namespace sparkdl

#endif  // SPARKDL_COPY_H_
