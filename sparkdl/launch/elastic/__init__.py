"""Elastic launches: ranks come and go while the function runs, and form a new world each time.

Each rank of an elastic launch is a *member*, a launch of its own with its own task of Spark, so that a lost executor
ends the members on it and no others. Begin with :mod:`~sparkdl.launch.elastic.members`, which starts and supervises
them on the *driver*; :mod:`~sparkdl.launch.elastic.roster` decides who forms the next
:class:`~sparkdl.launch.wire.world.World`, and :mod:`~sparkdl.launch.elastic.offers` adds slots of other processes.
Where the executors cannot reach the driver, :mod:`~sparkdl.launch.elastic.coordinating_task` has a task do its part.
The other end, on the *rank*, is :mod:`~sparkdl.launch.rank.membership`. They exchange a few keys of a rendezvous
that the driver serves::

    rank    post("arrivals", MemberArrival)          it has started, or its world has failed, or it is done
    driver  set("answers/<number>", World)     once the next world is complete, or why there is none for it
    driver  set("leave/<world>", b"")          members wait to join: leave this world after the current step
    driver  set("broken/<world>", member)      a member of this world is lost: leave it at once
"""
