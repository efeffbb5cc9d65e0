"""Files and filesystems: URLs, errors of disks and object stores, read-ahead and reads that hang.

Runs on driver and ranks; the lowest layer of :mod:`sparkdl.data`. Begin with :mod:`~sparkdl.data.files.filesystems`,
which opens every path and URL.
"""
