// Python's signal handlers, which run in the middle of blocking calls.
#ifndef SPARKDL_BINDINGS_SIGNALS_H_
#define SPARKDL_BINDINGS_SIGNALS_H_

namespace sparkdl::bindings {

// Runs the handlers of signals that came. Returns true if one raised; its exception stays set in
// the calling thread. Acquires the GIL.
bool HasSignal();

// A call on a communicator that runs signal handlers while it blocks. A handler that calls the same
// communicator would wait for the call that waits for the handler, so it gets an error.
class InterruptibleCall {
 public:
  // Raises CommunicatorError if this thread is in such a call already. Needs the GIL.
  explicit InterruptibleCall(const void* communicator);
  ~InterruptibleCall();
  InterruptibleCall(const InterruptibleCall&) = delete;
  InterruptibleCall& operator=(const InterruptibleCall&) = delete;

  // Raises CommunicatorError if this thread is in such a call. Needs the GIL.
  static void RaiseIfInside(const void* communicator);
};

}  // namespace sparkdl::bindings

#endif  // SPARKDL_BINDINGS_SIGNALS_H_
