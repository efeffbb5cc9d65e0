"""Communicators on the native core: shared memory inside a host, TCP between hosts.

Begin with :mod:`~sparkdl.collective.native.communicator`. ``segment`` and ``rings`` make the memory and the sockets
that the extension :mod:`sparkdl._native`, which moves the data, is handed; messages between two ranks
(``point_to_point``, ``message_link``) are written in Python. Runs on ranks.
"""
