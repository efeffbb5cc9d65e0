"""What a job's process ends with, so that a scheduler knows whether to run it again.

=====  =================================================================================================
code   meaning
=====  =================================================================================================
0      done, also where an equal job had been done before
1      failed, and would fail again: data, model or code have to be mended; also ranks that hang as they call
       operations in different orders, or as one that is alive comes no further by itself
2      the command line or the job file is wrong; nothing was started
75     lost ranks, executors, slots or the cluster (``EX_TEMPFAIL`` of sysexits.h): run it again; also after
       any other hang: a process or host that does not answer, a rank that others waited for
130    ended by SIGINT, Ctrl-C
143    ended by SIGTERM
=====  =================================================================================================
"""

from __future__ import annotations

import os
import signal

from sparkdl.errors import CheckpointsInUseError, HangError, LossError, ParamError, SlotsMissingError

DONE = 0
FAILED = 1
WRONG_USAGE = 2
TRY_AGAIN = os.EX_TEMPFAIL
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM

_TEMPORARY = (LossError, SlotsMissingError, CheckpointsInUseError)


class Terminated(KeyboardInterrupt):
    """SIGTERM came; whatever ends a fit on Ctrl-C ends it then, too."""


def exit_code(error: BaseException) -> int:
    """Return what a process ends with that was ended by an exception."""
    if isinstance(error, Terminated):
        return TERMINATED
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, HangError) and error.is_in_code:
        return FAILED
    if isinstance(error, _TEMPORARY):
        return TRY_AGAIN
    return WRONG_USAGE if isinstance(error, ParamError) else FAILED
