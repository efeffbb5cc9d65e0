"""Measurements of communicators: monitors, reports, timelines, stalls.

Begin with :mod:`~sparkdl.collective.telemetry.observation`, the methods of every communicator for reports and
timelines. They read a ``monitor`` and make a ``report`` or a ``timeline`` of it. ``stalls`` lists the operations that a
rank waits in, and the ranks that it waits for. Runs on ranks.
"""
