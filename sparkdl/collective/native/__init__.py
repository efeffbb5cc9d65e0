"""Communicators on the native core: shared memory inside a host, TCP between hosts.

Begin with :mod:`~sparkdl.collective.native.communicator`. ``segment`` creates the shared memory and
``ring_connections`` the sockets for the extension :mod:`sparkdl._native`, which moves the data. Messages between two
ranks (``point_to_point``, ``message_link``) are written in Python. Runs on ranks.
"""
