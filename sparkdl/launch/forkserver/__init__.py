"""A process per executor that has imported what ranks need, and from which ranks are forked. Runs on *executors*.

Begin with :mod:`~sparkdl.launch.forkserver.kept`; ``client`` asks the process that ``start`` has started and that runs
``process``, and ``guard`` ends it with those who use it.
"""
