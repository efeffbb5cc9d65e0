"""Files and the systems that hold them: URLs, errors of disks and object stores, reads ahead and reads that hang.

Runs on driver and ranks; the lowest layer of :mod:`sparkdl.data`. Begin with :mod:`~sparkdl.data.files.filesystems`,
which opens every path and URL.
"""
