"""The cache of one layer of a ragged batch, whichever kind the layer is."""

from __future__ import annotations

from omlx_worker.engine.ragged.attention_cache import AttentionCache
from omlx_worker.engine.ragged.recurrent_cache import RecurrentCache

LayerCache = AttentionCache | RecurrentCache
