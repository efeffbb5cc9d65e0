"""A fit, from the call of ``fit(df)`` to the model. Runs on the *driver*.

Begin with :mod:`~sparkdl.estimators.fit.fit`. The order of a fit is ``inputs`` and ``labels`` (what the columns hold),
``rows`` and ``split`` (what is trained on), ``trials`` (a step on the driver), ``checkpoints``, and then
:mod:`sparkdl.training.remote`, which ranks run.
"""
