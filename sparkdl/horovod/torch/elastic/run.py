"""``hvd.elastic.run``: a training function that is taken up again after a failed collective."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar, cast

from sparkdl.collective.failure_origin import Origin, origin_of
from sparkdl.horovod.torch.basics import begin_again
from sparkdl.horovod.torch.elastic.commits import State, take_up_commit
from sparkdl.horovod.torch.names import HorovodInternalError, HostsUpdatedInterrupt

P = ParamSpec("P")
R = TypeVar("R")
AnyState = TypeVar("AnyState", bound=State)


def run(
    func: Callable[Concatenate[AnyState, P], R],
) -> Callable[Concatenate[AnyState, P], R]:
    """Have a training function synchronize its state first, and begin again when a collective fails.

    After a ``HorovodInternalError`` the state is what was committed last, on the same ranks and with the process sets
    that ``init`` was given; those of ``add_process_set`` have to be added again, in a callback of the state's
    ``register_reset_callbacks`` say. All ranks have to see the error, as they do when it is the communicator that
    failed. Where :class:`sparkdl.Runner` has started the ranks again, the state begins
    with what those before them committed last.

    What would fail again is raised at once: an error of this rank's own code inside a collective, and what all ranks
    are told because they ask for different things, where it comes a second time without a commit in between. So is
    every error where parts of the state are sharded (FSDP2): ranks may have committed differently often, and the
    process group of their tensors does not begin again. There, :class:`sparkdl.Runner` takes up the last commit.

    Args:
        func: takes the state first.

    Returns:
        A function with the same arguments.
    """

    @wraps(func)
    def wrapper(state: AnyState, *args: P.args, **kwargs: P.kwargs) -> R:
        skip_sync = False
        before: tuple[str, int] | None = None
        take_up_commit(state)
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                origin = origin_of(error)
                now = str(error), state._num_commits
                if origin is Origin.OWN or (origin is Origin.SHARED and now == before):
                    raise
                if state._sharded_parts():
                    raise
                before = now
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            begin_again()
            state.on_reset()

    return cast(Callable[Concatenate[AnyState, P], R], wrapper)
