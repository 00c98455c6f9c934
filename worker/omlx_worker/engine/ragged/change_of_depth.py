"""What one step leaves behind, in the shape that a step of another depth takes.

A step is traced for every shape it meets: how many drafts it judges, and of how many positions it
may have to replay the inputs. Were it to take up whatever was left behind, each pair of depths
would have two traces of its own beside those of either depth, and a short trial of another depth
would trace five times: with 32 layers that took as long as a dozen steps on one NVIDIA H200.

So drafts are cut or padded to the depth that is asked for now, and kept inputs padded: to what a
step of that depth keeps, or, where more may have to be replayed, to the most that any step does.
Drafts that are cut off were made in vain, once a change.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from omlx_worker.engine.ragged.layer_cache import LayerCache
from omlx_worker.engine.ragged.recurrent_cache import RecurrentCache
from omlx_worker.engine.ragged.slots import widened
from omlx_worker.engine.ragged.step import State

_OF_DRAFTS = ("drafts", "weights")
"""What the state has of drafts, ``[S, K, ...]``."""


def fit(state: State, caches: Sequence[LayerCache], depth: int, deepest: int) -> State:
    """The state for a step that drafts ``depth`` tokens; caches are changed in place.

    Where nothing was drafted before, the step has a window of one token, and nothing to judge.

    Args:
        deepest: the most that any step drafts.
    """
    if depth and "drafts" not in state:
        return state
    for cache in caches:
        if isinstance(cache, RecurrentCache):
            cache.fit(1 + depth, 1 + deepest)
    if "drafts" not in state or state["drafts"].shape[1] == depth:
        return state
    rest = {name: array for name, array in state.items() if name not in _OF_DRAFTS}
    if depth:
        rest |= {n: widened(state[n], depth)[:, :depth] for n in _OF_DRAFTS if n in state}
    return rest | {"drafted": mx.minimum(state["drafted"], depth)}
