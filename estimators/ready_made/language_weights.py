"""The decoder of a language model before a fit, on the *driver*: without weights, if ranks can draw or read them.

A decoder that is made from sizes, or from a Hugging Face folder whose weights need no conversion, has no weights on the
driver: each rank draws or reads its part. Any other folder is read completely, and a warning says why.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparkdl.errors import SavedModelError, StoreError
from sparkdl.networks.decoder import Decoder, DecoderSizes
from sparkdl.networks.language import LanguageNetwork
from sparkdl.networks.language_folder import load_language_folder, why_converted
from sparkdl.training.spec import DRAWN

if TYPE_CHECKING:
    from sparkdl.data import Store
    from sparkdl.networks.language import FolderTokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """The network at the beginning of a fit.

    Attributes:
        network: network to train.
        weights: where the initial weights are: :data:`~sparkdl.training.spec.DRAWN` if the ranks draw them, a local
            folder on the driver if the ranks read them, None if ``network`` holds them.
    """

    network: LanguageNetwork
    weights: str | None

    @contextmanager
    def reachable_weights(self, store: Store) -> Iterator[str | None]:
        """Give the value of ``weights`` for ranks; within this context a local folder is copied to the Store.

        Raises:
            StoreError: if the folder cannot be copied.
        """
        if self.weights is None or self.weights == DRAWN:
            yield self.weights
            return
        from sparkdl.parallel.weights import copy_weights  # with torch's device meshes

        with store.scratch_folder("pretrained") as folder:
            copy_weights(self.weights, folder)
            yield folder


def beginning_of_sizes(sizes: DecoderSizes) -> Beginning:
    """Return a decoder of sparkdl, whose weights ranks draw with the seed of the fit."""
    from sparkdl.parallel import on_meta

    with on_meta():
        return Beginning(network=LanguageNetwork(Decoder(sizes)), weights=DRAWN)


def beginning_of_folder(
    folder: str, *, lora_rank: int | None, seed: int
) -> tuple[FolderTokenizer, Beginning]:
    """Return the tokenizer and the network of a folder.

    For arguments and exceptions see :func:`sparkdl.networks.language_folder.load_language_folder`.
    """
    from sparkdl.parallel import on_meta
    from sparkdl.parallel.weights import check_weights

    reason = why_converted(folder)
    if reason is None:
        tokenizer, decoder = load_language_folder(
            folder, lora_rank=lora_rank, seed=seed, without_weights=on_meta
        )
        network = LanguageNetwork(decoder)
        try:
            check_weights(network, folder)
        except (StoreError, SavedModelError) as error:
            reason = str(error)
        else:
            return tokenizer, Beginning(network=network, weights=folder)
    logger.warning(
        "The driver reads the whole model in %s, as ranks cannot read their parts of it: %s A folder that "
        "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other) has written may do.",
        folder,
        reason if reason.endswith((".", "?")) else f"{reason}.",
    )
    tokenizer, model = load_language_folder(folder, lora_rank=lora_rank, seed=seed)
    return tokenizer, Beginning(network=LanguageNetwork(model), weights=None)
