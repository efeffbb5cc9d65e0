"""Mixes several datasets in fixed proportions, and packs token sequences to one length.

``blending`` mixes feeds as a *rank* reads them, each through a ``row_stream`` (an endless stream of its rows, in
portions of any size); begin with :mod:`~sparkdl.data.blend.blending`. ``rows`` mixes the rows of a DataFrame, which is
planned on the *driver* and done on *executors*. Both take their proportions from ``mixture``. ``packing`` is
independent of these: it packs a rank's rows, or for :class:`~sparkdl.estimators.LanguageModel` the texts on
*executors*.
"""
