"""The forkserver: a process per executor that has imported what ranks need, and from which ranks are forked.

Begin with :mod:`~sparkdl.launch.forkserver.reuse`; ``client`` holds both ends of a connection to the forkserver,
``start`` finds or starts it, ``process`` is its program, ``forked_rank`` is a rank forked from it, and ``guard`` ends
ranks whose starting process was killed.
"""
