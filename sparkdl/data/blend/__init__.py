"""Several datasets in fixed proportions, and token sequences packed to one length. Runs on the *rank*.

Begin with :mod:`~sparkdl.data.blend.blending`; :mod:`~sparkdl.data.blend.packing` stands alone.
"""
