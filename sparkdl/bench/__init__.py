"""``sparkdl bench``: measures sparkdl against other libraries on this machine, in one run and in new processes."""
