"""A fit, from the call of ``fit(df)`` to the model. Runs on the *driver*, but for ``on_rank`` and ``host_watch``.

Begin with :mod:`~sparkdl.estimators.fit.fit`. The way of a fit is ``inputs`` and ``labels`` (what the columns hold),
``rows`` and ``split`` (what is trained on), ``trials`` (a step on the driver), ``checkpoints``, and ``on_rank``, to
and from which ``transfer`` brings spec and weights.
"""
