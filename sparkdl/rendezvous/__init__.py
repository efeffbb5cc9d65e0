"""How the processes of a job find each other and prove who they are: the lowest layer of communication.

Begin with :mod:`~sparkdl.rendezvous.store`, the contract of the key-value store in which ranks meet; ``coordinator`` is
a server of it, ``client`` the client. ``listener`` and ``dialing`` make connections whose two ends have proved by a
``handshake`` that they know the job's secret; messages travel over them as ``frames``. Runs on ranks and where they are
started; needs only the standard library.
"""
