"""Measurements of communicators: monitors, reports, timelines, stalls.

Begin with :mod:`~sparkdl.collective.telemetry.observation`, the methods of every communicator for reports and
timelines. They read a ``monitor`` and make a ``report`` or a ``timeline`` from it. ``stalls`` lists the operations in
which a rank waits, and the ranks for which it waits. Runs on ranks.
"""
