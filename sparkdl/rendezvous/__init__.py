"""How the processes of a job find each other and prove who they are: the lowest floor that communicates.

Begin with :mod:`~sparkdl.rendezvous.store`, the contract of the key-value store in which ranks meet; ``coordinator``
serves one, ``client`` asks it. ``listener`` and ``dialing`` make connections whose two ends have proved by a
``handshake`` that they know the job's secret; messages go over them as ``frames``. Runs on ranks and
where they are started; needs the standard library alone.
"""
