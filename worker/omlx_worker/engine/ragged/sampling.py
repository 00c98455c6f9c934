"""Sampling on the device for all rows of a batch at once, each by its own settings.

The order is mlx-lm's. Logit bias and penalties change the logits. Tokens that a constraint forbids
get probability 0, and the others are normalised. Top-p, min-p and top-k keep the likeliest tokens
of the untempered distribution (the definitions of `make_sampler`). The kept log-probabilities are
divided by the temperature and sampled. All three filters keep the tokens above some
log-probability, so together they are one threshold and their order does not matter. Tokens tied
with the threshold are kept.

Sampling adds Gumbel noise and takes the largest (the Gumbel-max trick, exact up to float32). The
noise depends on the row's seed, the position and the token id alone, so a seeded row draws the same
tokens in every batch, slot and step.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from omlx_producer.wire import FILTERS, MAX_TOP_LOGPROBS
from omlx_worker.engine.rows.request import Sampling
from omlx_worker.engine.rows.row import Sampled, Scored

IDLE = Sampling(temperature=0)
"""How slots without rows sample."""

Params = dict[str, mx.array]
"""The settings of rows in slots, of which a plan needs a part:

| array | shape, type | needed |
| --- | --- | --- |
| ``keys`` | ``[S, 2]`` uint32, random keys | always |
| ``temperature`` | ``[S, 1, 1]`` | with noise |
| each of `FILTERS` | ``[S, 1, 1]``, int32 if its neutral value is a whole number | with filters |
| ``repetition``, ``presence``, ``frequency`` | ``[S, 1, 1]`` | with penalties |
| ``bias_tokens`` | ``[S, biases]`` int32, padded by token 0 | with biases |
| ``bias_values`` | ``[S, biases]``, padded by 0 | with biases |
| ``active`` | ``[S]`` int32, 1 in slots with rows | in a step |
| ``depth`` | ``[S]`` int32, drafts of each row, at most | in a step |

Without a type, they are float32.
"""

FEWEST_BIASES = 64
"""Entries of a logit bias that all shorter ones are padded to."""


@dataclass(frozen=True)
class Plan:
    """The computations that the rows of a batch need. Each plan has its own compiled step.

    Attributes:
        noise: some row has a temperature.
        filters: some row with a temperature has any.
        penalties: some row has a penalty, so token counts are kept.
        biases: entries of the longest logit bias, rounded up to a power of two, at least
            `FEWEST_BIASES`.
    """

    noise: bool = False
    filters: bool = False
    penalties: bool = False
    biases: int = 0

    @classmethod
    def of(cls, rows: Sequence[Sampling]) -> Plan:
        longest = max((len(row.logit_bias) for row in rows), default=0)
        sampled = [row for row in rows if row.temperature > 0]
        return cls(
            noise=bool(sampled),
            filters=any(row.filters for row in sampled),
            penalties=any(row.penalises for row in rows),
            biases=max(FEWEST_BIASES, 1 << (longest - 1).bit_length()) if longest else 0,
        )


@dataclass(frozen=True, slots=True)
class Draw:
    """What was sampled, on the host.

    Attributes:
        tokens: ``[S][W]``.
        logprobs: ``[S][W]``, of the tokens, after penalties and constraints and before filters;
            None unless they are asked for.
        top_tokens, top_logprobs: ``[S][W][MAX_TOP_LOGPROBS]``, likeliest first; likewise.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]] | None = None
    top_tokens: list[list[list[int]]] | None = None
    top_logprobs: list[list[list[float]]] | None = None

    @classmethod
    def of(cls, arrays: Sequence[mx.array]) -> Draw:
        """Wait for the device and copy the arrays of `report`."""
        parts: list[Any] = [array.tolist() for array in arrays]
        return cls(*parts)

    def at(self, sampling: Sampling, index: int, column: int = 0) -> Sampled:
        """The draw of the row at this index of the batch, at one position of its window."""
        token = self.tokens[index][column]
        asked = sampling.top_logprobs
        if asked is None or self.logprobs is None:
            return Sampled(token)
        top: tuple[tuple[int, float], ...] = ()
        if asked and self.top_tokens is not None and self.top_logprobs is not None:
            likeliest = self.top_tokens[index][column][:asked]
            pairs = zip(likeliest, self.top_logprobs[index][column], strict=False)
            # A constraint may allow fewer tokens than were asked for.
            top = tuple(pair for pair in pairs if pair[1] > -math.inf)
        return Sampled(token, self.logprobs[index][column], top)


def counts_of(tokens: Sequence[int], vocabulary: int) -> mx.array:
    """How often each token of the vocabulary occurs, ``[V]`` int32."""
    return mx.zeros((vocabulary,), mx.int32).at[mx.array(list(tokens), mx.int32)].add(1)


def params(rows: Sequence[Sampling], plan: Plan) -> Params:
    """The rows' settings as device arrays with a leading axis of rows, for `distribution`."""

    def column(values: list[Any], dtype: mx.Dtype = mx.float32) -> mx.array:
        return mx.array(values, dtype)[:, None, None]

    out: Params = {"keys": mx.array([_key(row.seed) for row in rows], mx.uint32)}
    if plan.noise:
        out["temperature"] = column([row.temperature for row in rows])
    if plan.filters:
        for name, neutral in FILTERS.items():
            dtype = mx.int32 if isinstance(neutral, int) else mx.float32
            out[name] = column([row.filters.get(name, neutral) for row in rows], dtype)
    if plan.penalties:
        out["repetition"] = column([row.repetition_penalty for row in rows])
        out["presence"] = column([row.presence_penalty for row in rows])
        out["frequency"] = column([row.frequency_penalty for row in rows])
    if plan.biases:
        entries = [list(row.logit_bias.items()) for row in rows]
        padded = [pairs + [(0, 0.0)] * (plan.biases - len(pairs)) for pairs in entries]
        out["bias_tokens"] = mx.array([[token for token, _ in row] for row in padded], mx.int32)
        out["bias_values"] = mx.array([[value for _, value in row] for row in padded])
    return out


@dataclass(frozen=True)
class Distribution:
    """What each row may sample at each window position.

    Attributes:
        logits: ``[S, W, V]``, the model's own after bias, penalties and constraints.
        weights: ``[S, W, V]`` float32, log-weights after filters and temperature, not
            normalised; at temperature 0 all on the likeliest token. None if no row of the plan
            has a temperature: then the sample is the likeliest token.
    """

    logits: mx.array
    weights: mx.array | None

    def pick(self, noise: mx.array | None) -> mx.array:
        """The samples ``[S, W]`` int32 that this noise draws."""
        scores = self.logits if self.weights is None or noise is None else self.weights + noise
        return mx.argmax(scores, axis=-1).astype(mx.int32)


def distribution(
    logits: mx.array,
    counts: mx.array | None,
    params: Params,
    plan: Plan,
    allowed: mx.array | None = None,
) -> Distribution:
    """The distribution that logits ``[S, W, V]`` give each row.

    Args:
        counts: ``[S, W, V]``, how often each token occurs in the history before each sample;
            needed if the plan has penalties.
        params: from `params`, for the same plan.
        allowed: ``[S, W, ceil(V / 32)]`` uint32, a set bit for each token that may be sampled, the
            lowest first; None for all.
    """
    if plan.biases or plan.penalties:
        logits = logits.astype(mx.float32)
    if plan.biases:
        rows = mx.arange(logits.shape[0])[:, None]
        bias = mx.zeros((logits.shape[0], logits.shape[-1]))
        bias = bias.at[rows, params["bias_tokens"]].add(params["bias_values"])
        logits = logits + bias[:, None]
    if plan.penalties:
        assert counts is not None
        logits = _penalise(logits, counts, params)
    if allowed is not None:
        logits = mx.where(_expanded(allowed, logits.shape[-1]), logits, -mx.inf)
    if not plan.noise:
        return Distribution(logits, None)
    logprobs = logprobs_of(logits)
    if plan.filters:
        logprobs = mx.where(logprobs >= _threshold(logprobs, params), logprobs, -mx.inf)
    temperature = params["temperature"]
    likeliest = mx.argmax(logits, axis=-1, keepdims=True)
    alone = mx.where(mx.arange(logits.shape[-1]) == likeliest, 0.0, -mx.inf)
    weights = mx.where(temperature > 0, logprobs / mx.maximum(temperature, 1e-6), alone)
    return Distribution(logits, weights)


def logprobs_of(logits: mx.array) -> mx.array:
    """Log-probabilities, float32, along the last axis."""
    precise = logits.astype(mx.float32)
    return precise - mx.logsumexp(precise, axis=-1, keepdims=True)


def noise(keys: mx.array, positions: mx.array, vocabulary: int) -> mx.array:
    """Gumbel noise ``[S, W, vocabulary]``.

    Args:
        keys: ``[S, 2]`` uint32, one a row.
        positions: ``[S, W]`` int32, the token's position in the row's history.
    """
    draw = mx.vmap(lambda key: mx.random.gumbel((vocabulary,), key=key))
    return draw(_keys_at(keys, positions)).reshape(*positions.shape, vocabulary)


def report(logits: mx.array, tokens: mx.array, rows: Sequence[Sampling]) -> list[mx.array]:
    """Sampled tokens ``[S, W]`` and the log-probabilities that any of these rows asks for: the
    arrays of a `Draw` that there are.

    It is no part of the compiled step, so rows that ask for them do not add plans.

    Args:
        logits: of the `Distribution` that the tokens were sampled from.
    """
    asked = [row.top_logprobs for row in rows if row.top_logprobs is not None]
    if not asked:
        return [tokens]
    return [tokens, *(_alternatives if any(asked) else _chosen)(logits, tokens)]


@mx.compile
def _chosen(logits: mx.array, tokens: mx.array) -> list[mx.array]:
    """The tokens' own log-probabilities."""
    return [mx.take_along_axis(logprobs_of(logits), tokens[..., None], axis=-1)[..., 0]]


@mx.compile
def _alternatives(logits: mx.array, tokens: mx.array) -> list[mx.array]:
    """The tokens' own log-probabilities, the likeliest tokens, and theirs."""
    logprobs = logprobs_of(logits)
    count = min(MAX_TOP_LOGPROBS, logprobs.shape[-1])
    top = mx.argpartition(-logprobs, kth=count - 1, axis=-1)[..., :count]
    values = mx.take_along_axis(logprobs, top, axis=-1)
    order = mx.argsort(-values, axis=-1)
    ranked = [mx.take_along_axis(part, order, axis=-1) for part in (top, values)]
    return [*_chosen(logits, tokens), *ranked]


def score(logits: mx.array, tokens: Sequence[int], alternatives: int) -> list[Scored]:
    """The log-probabilities that logits ``[P, V]`` give tokens. Waits for the device."""
    precise = logits.astype(mx.float32)
    total = mx.logsumexp(precise, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(precise, mx.array(list(tokens), mx.int32)[:, None], axis=-1)
    parts = [(chosen - total)[:, 0], 1 + (precise > chosen).sum(axis=-1)]
    if alternatives == 1:
        top = mx.argmax(precise, axis=-1, keepdims=True)
    elif alternatives:
        top = mx.argpartition(-precise, kth=alternatives - 1, axis=-1)[:, :alternatives]
        order = mx.argsort(-mx.take_along_axis(precise, top, axis=-1), axis=-1)
        top = mx.take_along_axis(top, order, axis=-1)
    else:
        top = mx.zeros((len(tokens), 0), mx.uint32)
    parts += [top, mx.take_along_axis(precise, top, axis=-1) - total]
    mx.eval(parts)
    read: list[Any] = [part.tolist() for part in parts]
    logprobs, ranks, ids, values = read
    pairs = [tuple(zip(*each, strict=True)) for each in zip(ids, values, strict=True)]
    return [Scored(*each) for each in zip(tokens, logprobs, pairs, ranks, strict=True)]


def _penalise(logits: mx.array, counts: mx.array, params: Params) -> mx.array:
    repetition = params["repetition"]
    seen = counts > 0
    repeated = mx.where(logits < 0, logits * repetition, logits / repetition)
    logits = mx.where(seen, repeated, logits)
    return logits - params["presence"] * seen - params["frequency"] * counts


def _expanded(allowed: mx.array, vocabulary: int) -> mx.array:
    """Bits ``[S, W, ceil(V / 32)]`` as bools ``[S, W, V]``."""
    bits = (allowed[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
    return (bits != 0).reshape(*allowed.shape[:2], -1)[..., :vocabulary]


def _threshold(logprobs: mx.array, params: Params) -> mx.array:
    """The smallest log-probability that all of a row's filters keep, ``[S, W, 1]``."""
    vocabulary = logprobs.shape[-1]
    ranked = mx.sort(logprobs, axis=-1)
    above = mx.cumsum(mx.exp(ranked), axis=-1, reverse=True, inclusive=False)
    dropped = (above >= params["top_p"]).sum(axis=-1, keepdims=True)
    # top_p = 1 keeps everything, whatever rounding made of the sum.
    dropped = mx.where(params["top_p"] < 1, mx.minimum(dropped, vocabulary - 1), 0)
    top_k = params["top_k"]
    outside = mx.where(top_k > 0, mx.maximum(vocabulary - top_k, 0), 0)
    rank = mx.maximum(dropped, outside)
    by_rank = mx.take_along_axis(ranked, rank, axis=-1)
    return mx.maximum(by_rank, ranked[..., -1:] + mx.log(params["min_p"]))


def _keys_at(keys: mx.array, positions: mx.array) -> mx.array:
    """Random keys ``[S * W, 2]`` of positions ``[S, W]``, from row keys ``[S, 2]``."""
    low = keys[:, None, 1:] + positions[..., None].astype(mx.uint32)
    high = mx.broadcast_to(keys[:, None, :1], low.shape)
    return mx.concatenate([high, low], axis=-1).reshape(-1, 2)


def _key(seed: int) -> list[int]:
    """A seed as the two words of a random key, hashed so that near seeds share no noise."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little", signed=seed < 0), digest_size=8).digest()
    return [int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")]
