"""The process of a rank, from its start to the call of the user's function. Runs on the *rank*, with two exceptions.

``environment`` and the reading half of ``stacks`` (``StackFile`` and what it uses) run in the barrier task, or on the
*driver* for ranks of its own machine.
Begin with :mod:`~sparkdl.launch.rank.process`; :mod:`~sparkdl.launch.rank.context` is the function's first argument.
"""
