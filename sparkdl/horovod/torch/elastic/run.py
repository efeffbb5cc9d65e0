"""``hvd.elastic.run``: restarts a training function after a failed collective."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar, cast

from sparkdl.collective.error_origin import Origin, origin_of
from sparkdl.horovod.torch.basics import begin_again
from sparkdl.horovod.torch.elastic.state import State
from sparkdl.horovod.torch.names import HorovodInternalError, HostsUpdatedInterrupt

P = ParamSpec("P")
R = TypeVar("R")
AnyState = TypeVar("AnyState", bound=State)


def run(
    func: Callable[Concatenate[AnyState, P], R],
) -> Callable[Concatenate[AnyState, P], R]:
    """Decorate a training function: synchronize its state first, and call it again when a collective fails.

    After a ``HorovodInternalError`` the function is called again with the state of the last commit, on the same ranks
    and with the process sets given to ``init``. Process sets of ``add_process_set`` have to be added again, for example
    in a callback of the state's ``register_reset_callbacks``. All ranks must see the error, as they do when the
    communicator has failed. If :class:`sparkdl.Runner` has restarted the ranks, the state begins with the last commit
    of the ranks before.

    An error that would occur again is raised at once: an error in this rank's own code inside a collective, and a
    disagreement of the ranks about an operation, if it occurs a second time without a commit in between. Every error is
    raised if parts of the state are sharded (FSDP2): the ranks' numbers of commits may differ, and the process group of
    their tensors is not opened again. In that case :class:`sparkdl.Runner` continues from the last commit.

    Args:
        func: training function whose first argument is the state.

    Returns:
        A function with the same arguments.
    """

    @wraps(func)
    def wrapper(state: AnyState, *args: P.args, **kwargs: P.kwargs) -> R:
        skip_sync = False
        before: tuple[str, int] | None = None
        reason = ""
        state.take_up_commit()
        while True:
            try:
                if not skip_sync:
                    state.sync()
                    state._agree_on_commits()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                origin = origin_of(error)
                now = str(error), state._num_commits
                if origin is Origin.OWN or (origin is Origin.SHARED and now == before):
                    raise
                if state._sharded_parts():
                    raise
                before, reason = now, str(error)
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync, reason = interrupt.skip_sync, "other ranks wait to join"
            begin_again(reason, progress=state._num_commits or -1)
            state.on_reset()

    return cast(Callable[Concatenate[AnyState, P], R], wrapper)
