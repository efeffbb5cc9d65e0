"""The barrier task of a rank: meets the other tasks, starts its rank, relays its output and watches it.

Runs on *executors*, or as a thread of the *driver* for ranks of its own machine. Begin with
:mod:`~sparkdl.launch.task.barrier_task`.
"""
