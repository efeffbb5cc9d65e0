"""``transform``: the model's outputs as columns. Runs on the *driver*, and inside UDFs on *executors*.

Begin with :mod:`~sparkdl.estimators.scoring.columns`; :mod:`~sparkdl.estimators.scoring.udf` computes the columns, with
a model that :mod:`~sparkdl.estimators.scoring.models` sends to executors.
"""
