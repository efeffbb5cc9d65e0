"""Finds ranks that stand still and says where: :mod:`~sparkdl.launch.hangs.watch` on the *driver*, with its report."""
