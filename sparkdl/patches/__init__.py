"""Changes to the insides of other libraries, one module for each.

Each module says what it changes and why, the upstream issue, the versions that need it, and when it can go. Begin
with :mod:`~sparkdl.patches.accelerate`. Runs on the *rank*; ``meta_parameters`` also on the *driver*, as do the changes
to Petastorm, which are in :mod:`sparkdl.data.petastorm`, the only place that imports it.

What the sources of the versions in ``constraints.txt`` say, and so why each is still needed:

- ``accelerate`` (1.15.0, the newest): without a GPU and ``cpu=True``, ``_prepare_backend`` ends with
  ``DistributedType.NO``.
- ``batches`` (torch 2.13.0): ``batch_isend_irecv`` starts messages together if ``type(group) is ProcessGroup``.
- ``collate`` (torch 2.13.0): ``torch.utils.data`` does not export ``default_collate_fn_map``.
- ``compiler`` (torch 2.13.0): ``torch.compiler.disable`` imports ``torch._dynamo``.
- ``late_parameters`` (torch 2.13.0): the reducer gets its parameters when it is made.
- ``mesh_caches`` (torch 2.13.0): only private functions clear the caches.
- ``meta_parameters`` (torch 2.13.0): no context for parameters alone.
- ``rendezvous_handlers`` (torch 2.13.0): a scheme that has a handler is refused.
- Petastorm 0.12.1, and 0.13.1, the newest: both import ``pyarrow.filesystem``.

None could go yet. torch's of later releases are not checked.
"""
