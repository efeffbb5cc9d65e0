"""Several datasets in fixed proportions, and token sequences packed to one length.

``blending`` mixes feeds as a *rank* reads them; begin with :mod:`~sparkdl.data.blend.blending`. ``rows`` mixes the rows
of a DataFrame: planned on the *driver*, done on *executors*. Both take their proportions from ``mixture``. ``packing``
stands alone: it packs a rank's rows, or for :class:`~sparkdl.estimators.LanguageModel` the texts on *executors*.
"""
