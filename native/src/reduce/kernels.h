// The reduction loops. Each kernels_*.cc compiles this file for one instruction set, in a namespace
// of its own. Except for Find(), nothing here may have external linkage, and nothing may call an
// inline function of the standard library: the linker would merge the copies, and a machine without
// AVX could get the AVX copy.
#ifndef SPARKDL_KERNEL_NAMESPACE
#error "define SPARKDL_KERNEL_NAMESPACE to the name of the instruction set"
#endif

#include "reduce/number_formats.h"
#include "sparkdl/reduce/reduce.h"

namespace sparkdl::SPARKDL_KERNEL_NAMESPACE {
namespace {  // NOLINT(google-build-namespaces): internal linkage is the point

// Elements per round of the loops over more than two sources: the accumulators of a round stay in
// the L1 cache.
constexpr size_t kRound = 1024;

// Processors prefetch by themselves, but not beyond the page that they are reading. Prefetching one
// page ahead saves two to four percent of an allreduce of 4 or 64 MiB.
constexpr size_t kPrefetchAhead = 4096;
constexpr size_t kLine = 64;
constexpr size_t kPrefetchStep = 2 * kLine;

// Beyond the end of an array lies the next piece, or memory that cannot be read; a prefetch does
// not fault there.
inline void PrefetchAhead(const void* data) {
  const auto* const ahead = static_cast<const char*>(data) + kPrefetchAhead;
  for (size_t line = 0; line < kPrefetchStep; line += kLine) __builtin_prefetch(ahead + line);
}

// memcpy does not accept null pointers, not even for 0 bytes.
inline void Copy(void* destination, const void* source, size_t bytes) {
  if (bytes != 0 && destination != source) __builtin_memcpy(destination, source, bytes);
}

struct Sum {
  template <typename A>
  static A Apply(A a, A b) {
    return WrapAdd(a, b);
  }
};
struct Product {
  template <typename A>
  static A Apply(A a, A b) {
    return WrapMultiply(a, b);
  }
};
// A NaN on either side is the result, as in NumPy and torch.
struct Min {
  template <typename A>
  static A Apply(A a, A b) {
    return (a < b || a != a) ? a : b;
  }
};
struct Max {
  template <typename A>
  static A Apply(A a, A b) {
    return (a > b || a != a) ? a : b;
  }
};

template <typename T, typename A, typename Op, bool kDivides>
struct Kernels {
  using In = const Loose<T>*;
  static constexpr bool kPlain = kIsSame<T, A>;

  static size_t RoundAt(size_t done, size_t count) {
    return count - done < kRound ? count - done : kRound;
  }

  // accumulators = sources[0] op sources[1] op ... for the n elements at offset.
  static void Gather(A* accumulators, const void* const* sources, size_t num_sources, size_t offset,
                     size_t n) {
    Decode(static_cast<In>(sources[0]) + offset, accumulators, n);
    for (size_t s = 1; s < num_sources; ++s) {
      In source = static_cast<In>(sources[s]) + offset;
      if constexpr (kPlain) {
        for (size_t i = 0; i < n; ++i)
          accumulators[i] = Op::Apply(accumulators[i], A{source[i].value});
      } else {
        A decoded[kRound];
        Decode(source, decoded, n);
        for (size_t i = 0; i < n; ++i) accumulators[i] = Op::Apply(accumulators[i], decoded[i]);
      }
    }
  }

  static void FinishRound(A* accumulators, size_t n, const Finish& finish) {
    if constexpr (kDivides) {
      const A by = static_cast<A>(finish.divisor);
      for (size_t i = 0; i < n; ++i) accumulators[i] = static_cast<A>(accumulators[i] / by);
    }
    if (finish.factor != 1.0) {
      for (size_t i = 0; i < n; ++i)
        accumulators[i] = Scaled<NumberOf<T>>(accumulators[i], finish.factor);
    }
  }

  static void ReduceTwo(Loose<T>* destination, In a, In b, size_t count, uint64_t divisor) {
    [[maybe_unused]] const A by = static_cast<A>(divisor);
    const auto reduce = [&](size_t i) {
      A value = Op::Apply(A{a[i].value}, A{b[i].value});
      if constexpr (kDivides) value = static_cast<A>(value / by);
      destination[i].value = static_cast<T>(value);
    };
    constexpr size_t kStep = kPrefetchStep / sizeof(T);
    const bool is_long = count * sizeof(T) > kPrefetchAhead;
    size_t done = 0;
    // The destination may be a source; no iteration reads what another wrote.
    for (; done + kStep <= count; done += kStep) {
      if (is_long) {
        PrefetchAhead(a + done);
        PrefetchAhead(b + done);
      }
#pragma GCC ivdep
      for (size_t i = 0; i < kStep; ++i) reduce(done + i);
    }
#pragma GCC ivdep
    for (size_t i = done; i < count; ++i) reduce(i);
  }

  static void Reduce(void* destination, const void* const* sources, size_t num_sources,
                     size_t count, const Finish& finish) {
    auto* out = static_cast<Loose<T>*>(destination);
    if constexpr (kPlain) {
      if (num_sources == 2 && finish.factor == 1.0) {
        ReduceTwo(out, static_cast<In>(sources[0]), static_cast<In>(sources[1]), count,
                  finish.divisor);
        return;
      }
    }
    A accumulators[kRound];
    for (size_t done = 0; done < count; done += kRound) {
      const size_t n = RoundAt(done, count);
      Gather(accumulators, sources, num_sources, done, n);
      FinishRound(accumulators, n, finish);
      Encode(accumulators, out + done, n);
    }
  }

  static void ReduceToAccumulators(void* destination, const void* const* sources,
                                   size_t num_sources, size_t count) {
    if constexpr (kPlain) {
      if (num_sources == 1) {
        Copy(destination, sources[0], count * sizeof(T));
        return;
      }
      if (num_sources == 2 && !kDivides) {
        ReduceTwo(static_cast<Loose<T>*>(destination), static_cast<In>(sources[0]),
                  static_cast<In>(sources[1]), count, 1);
        return;
      }
    }
    A accumulators[kRound];
    for (size_t done = 0; done < count; done += kRound) {
      const size_t n = RoundAt(done, count);
      Gather(accumulators, sources, num_sources, done, n);
      __builtin_memcpy(static_cast<char*>(destination) + done * sizeof(A), accumulators,
                       n * sizeof(A));
    }
  }

  static void Combine(void* accumulators, const void* partial, size_t count) {
    auto* into = static_cast<Loose<A>*>(accumulators);
    const auto* from = static_cast<const Loose<A>*>(partial);
#pragma GCC ivdep
    for (size_t i = 0; i < count; ++i)
      into[i].value = Op::Apply(A{from[i].value}, A{into[i].value});
  }

  static void Finalize(void* destination, const void* accumulators, size_t count,
                       const Finish& finish) {
    if constexpr (kPlain && !kDivides) {
      if (finish.factor == 1.0) {
        Copy(destination, accumulators, count * sizeof(T));
        return;
      }
    }
    const auto* from = static_cast<const Loose<A>*>(accumulators);
    auto* out = static_cast<Loose<T>*>(destination);
    A round[kRound];
    for (size_t done = 0; done < count; done += kRound) {
      const size_t n = RoundAt(done, count);
      __builtin_memcpy(round, from + done, n * sizeof(A));
      FinishRound(round, n, finish);
      Encode(round, out + done, n);
    }
  }

  static void Scale(void* destination, const void* source, size_t count, double factor) {
    auto* out = static_cast<Loose<T>*>(destination);
    NumberOf<T> round[kRound];
    for (size_t done = 0; done < count; done += kRound) {
      const size_t n = RoundAt(done, count);
      Decode(static_cast<In>(source) + done, round, n);
      for (size_t i = 0; i < n; ++i) round[i] = Scaled<NumberOf<T>>(round[i], factor);
      Encode(round, out + done, n);
    }
  }

  static constexpr bool kIsLight = kPlain && (!kDivides || kIsFloat<T>);
  static constexpr ReduceKernels kTable = {
      sizeof(T), sizeof(A), kIsLight, &Reduce, &ReduceToAccumulators, &Combine, &Finalize, &Scale};
};

template <typename T, typename A, typename AverageA>
const ReduceKernels* ForOp(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return &Kernels<T, A, Sum, false>::kTable;
    case ReduceOp::kAvg:
      return &Kernels<T, AverageA, Sum, true>::kTable;
    case ReduceOp::kMin:
      return &Kernels<T, A, Min, false>::kTable;
    case ReduceOp::kMax:
      return &Kernels<T, A, Max, false>::kTable;
    case ReduceOp::kProduct:
      return &Kernels<T, A, Product, false>::kTable;
  }
  return nullptr;
}

const ReduceKernels* ForBool(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
      return &Kernels<Bool, uint8_t, Max, false>::kTable;
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
      return &Kernels<Bool, uint8_t, Min, false>::kTable;
    case ReduceOp::kAvg:
      break;
  }
  return nullptr;
}

}  // namespace

const ReduceKernels* Find(Dtype dtype, ReduceOp op) {
  switch (dtype) {
    case Dtype::kFloat32:
      return ForOp<float, float, float>(op);
    case Dtype::kFloat64:
      return ForOp<double, double, double>(op);
    case Dtype::kBfloat16:
      return ForOp<Bfloat16, float, float>(op);
    case Dtype::kFloat16:
      return ForOp<Float16, float, float>(op);
    case Dtype::kInt32:
      return ForOp<int32_t, int32_t, int64_t>(op);
    case Dtype::kInt64:
      return ForOp<int64_t, int64_t, int64_t>(op);
    case Dtype::kUint8:
      return ForOp<uint8_t, uint8_t, int32_t>(op);
    case Dtype::kInt8:
      return ForOp<int8_t, int8_t, int32_t>(op);
    case Dtype::kInt16:
      return ForOp<int16_t, int16_t, int64_t>(op);
    case Dtype::kUint16:
      return ForOp<uint16_t, uint16_t, int64_t>(op);
    case Dtype::kUint32:
      return ForOp<uint32_t, uint32_t, uint64_t>(op);
    case Dtype::kUint64:
      return ForOp<uint64_t, uint64_t, uint64_t>(op);
    case Dtype::kBool:
      return ForBool(op);
  }
  return nullptr;
}

}  // namespace sparkdl::SPARKDL_KERNEL_NAMESPACE
