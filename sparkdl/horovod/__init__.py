"""Horovod's face on sparkdl's communicators: for programs that were written against ``horovod.torch``."""
