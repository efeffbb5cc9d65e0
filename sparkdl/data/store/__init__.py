"""The Store: the folder or bucket in which the rows of fits are kept, shared and removed again.

Runs on the *driver*. Begin with :mod:`~sparkdl.data.store.store`; :mod:`~sparkdl.data.store.housekeeping` decides what
may be removed.
"""
