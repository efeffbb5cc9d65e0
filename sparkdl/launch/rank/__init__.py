"""The process of a rank, from its start to the call of the user's function. Runs on the *rank*.

Begin with :mod:`~sparkdl.launch.rank.process`; :mod:`~sparkdl.launch.rank.context` is the function's first argument.
"""
