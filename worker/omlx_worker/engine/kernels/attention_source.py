"""Sources of the attention kernels; see `omlx_worker.engine.kernels.attention_kernel`."""

from __future__ import annotations

from functools import cache

_BODY = """
  // Finite, and so is every difference: fast mathematics may take no number to be infinite.
  constexpr float masked = -1e38f;
  constexpr float lowest = -1e30f;
  constexpr int each = D / Lanes;
  constexpr int fours = each / 4;
  constexpr int at_once = Simd / Lanes;
  const int heads = body_keys_shape[1];
  ROOM
  const int tail = tail_keys_shape[2];
  const int query_heads = queries_shape[1];
  const int width = queries_shape[2];
  const int group = query_heads / heads;
  const int count = group * width;
  const int whole_tiles = (count + Tile - 1) / Tile;
  const int tiles = whole_tiles < Warps ? whole_tiles : Warps;
  const int splits = ROWS / Warps / ((whole_tiles + tiles - 1) / tiles);

  const int warp = row % Warps;
  const int split = row / Warps % splits;
  const int first_tile = row / Warps / splits * tiles;
  const int parts = Warps / tiles;
  const int part = warp / tiles;
  const int tile = first_tile + warp % tiles;
  const int taken = lane / Lanes;
  const int inside = lane % Lanes;
  const int slot = n / heads;
  const int head = n % heads;
  const int length = places[3 * slot];
  const int cursor = places[3 * slot + 1];

  // The queries of a key head are neighbours: number q is of head q / width, at place q % width.
  const long first_query = static_cast<long>(slot * query_heads + head * group) * width;
  float q[Tile][each];
  float sum[Tile][each];
  float peak[Tile];
  float mass[Tile];
  int place[Tile];
  for (int j = 0; j < Tile; ++j) {
    const int number = tile * Tile + j;
    const bool exists = number < count && part < parts;
    place[j] = exists ? cursor + number % width : -1;
    peak[j] = lowest;
    mass[j] = 0.0f;
    SINK
    for (int f = 0; f < fours; ++f) {
      Four<TQ> four = {};
      if (exists) four = FOUR(TQ, queries + (first_query + number) * D + 4 * (inside + Lanes * f));
      for (int i = 0; i < 4; ++i) {
        q[j][4 * f + i] = static_cast<float>(four.at[i]) * SCALE;
        sum[j][4 * f + i] = 0.0f;
      }
    }
  }

  // Positions are taken in their order, wherever the body ends and the tail begins.
  const int oldest = Ring && length > capacity ? length - capacity : 0;
  int begin = Sliding ? cursor - Sliding + 1 : 0;
  if (begin < oldest) begin = oldest;
  const int end = cursor + width;
  const int share = (end - begin + splits - 1) / splits;
  const int from = begin + split * share;
  const int to = from + share < end ? from + share : end;
  const int stride = parts * at_once;
  const int whole_ring = Ring ? Ring : 1;
  int base = part < parts ? from + part * at_once : to;
  int at = base + taken < to ? base + taken : base;
  Four<T> next_k[fours];
  Four<T> next_v[fours];
  if (base < to) {
    FETCH
  }
  while (base < to) {
    const bool valid = base + taken < to;
    const int position = at;
    float k[each];
    float v[each];
    for (int e = 0; e < each; ++e) {
      k[e] = static_cast<float>(next_k[e / 4].at[e % 4]);
      v[e] = static_cast<float>(next_v[e / 4].at[e % 4]);
    }
    // The next position is on its way while this one is weighed.
    base += stride;
    at = base + taken < to ? base + taken : base;
    if (base < to) {
      FETCH
    }
    for (int j = 0; j < Tile; ++j) {
      float score = 0.0f;
      for (int e = 0; e < each; ++e) score += q[j][e] * k[e];
      for (int offset = Lanes / 2; offset > 0; offset /= 2) score += ACROSS(score, offset);
      CAP
      const bool recent = !Sliding || position > place[j] - Sliding;
      if (!(valid && recent && position <= place[j])) score = masked;
      if (score > peak[j]) {
        const float fade = EXP(peak[j] - score);
        peak[j] = score;
        mass[j] *= fade;
        for (int e = 0; e < each; ++e) sum[j][e] *= fade;
      }
      const float weight = EXP(score - peak[j]);
      mass[j] += weight;
      for (int e = 0; e < each; ++e) sum[j][e] += weight * v[e];
    }
  }

  for (int offset = Lanes; offset < Simd; offset *= 2) {
    for (int j = 0; j < Tile; ++j) {
      const float other = ACROSS(peak[j], offset);
      const float higher = other > peak[j] ? other : peak[j];
      const float fade = EXP(peak[j] - higher);
      mass[j] *= fade;
      mass[j] += ACROSS(mass[j], offset);
      for (int e = 0; e < each; ++e) {
        sum[j][e] *= fade;
        sum[j][e] += ACROSS(sum[j][e], offset);
      }
      peak[j] = higher;
    }
  }

  SHARED float sums[Warps][Tile][D];
  SHARED float peaks[Warps][Tile];
  SHARED float masses[Warps][Tile];
  if (taken == 0) {
    for (int j = 0; j < Tile; ++j) {
      for (int e = 0; e < each; ++e) {
        sums[warp][j][4 * (inside + Lanes * (e / 4)) + e % 4] = sum[j][e];
      }
      if (inside == 0) {
        peaks[warp][j] = peak[j];
        masses[warp][j] = mass[j];
      }
    }
  }
  BARRIER;
  for (int i = warp * Simd + lane; i < tiles * Tile * D; i += Warps * Simd) {
    const int d = i % D;
    const int j = i / D % Tile;
    const int of = i / D / Tile;
    const int number = (first_tile + of) * Tile + j;
    if (number >= count) continue;
    float highest = peaks[of][j];
    for (int w = of + tiles; w < tiles * parts; w += tiles) {
      if (peaks[w][j] > highest) highest = peaks[w][j];
    }
    float whole = 0.0f;
    float weights = 0.0f;
    for (int w = of; w < tiles * parts; w += tiles) {
      const float fade = EXP(peaks[w][j] - highest);
      whole += fade * sums[w][j][d];
      weights += fade * masses[w][j];
    }
    WRITE
  }
"""

_FETCH = """
    const bool in_body = at < length;
    const int index = !in_body ? at - length : Ring ? at % whole_ring : at;
    const long vector = (in_body ? IN_BODY : static_cast<long>(n) * tail + index) * D;
    READONLY T* k_at = (in_body ? body_keys : tail_keys) + vector + 4 * inside;
    READONLY T* v_at = (in_body ? body_values : tail_values) + vector + 4 * inside;
    for (int f = 0; f < fours; ++f) {
      next_k[f] = FOUR(T, k_at + 4 * Lanes * f);
      next_v[f] = FOUR(T, v_at + 4 * Lanes * f);
    }
"""

_WHOLE = ("body_keys_shape[2]", "static_cast<long>(n) * capacity + index")
_PAGED = (
    "table_shape[1] * Page",
    "(static_cast<long>(table[slot * table_shape[1] + index / Page]) * heads + head) * Page"
    " + index % Page",
)
"""The capacity of a body, and where it has an index: without pages and with them."""

_SINK = """
    if (part == 0 && split == 0 && taken == 0 && exists) {
      peak[j] = static_cast<float>(sinks[head * group + number / width]);
      mass[j] = 1.0f;
    }
"""

_WRITE = """
    const long at = static_cast<long>(slot * width + number % width) * query_heads + head * group;
    mixed[(at + number / width) * D + d] = static_cast<TQ>(whole / weights);
"""

_WRITE_PART = """
    const long at = (static_cast<long>(n) * count + number) * splits + split;
    partly[at * D + d] = whole;
    if (d == 0) {
      weighed[2 * at] = highest;
      weighed[2 * at + 1] = weights;
    }
"""

JOIN = """
  // One number of one query's output: lane is its place in the vector, n the query.
  const int heads = body_keys_shape[1];
  const int query_heads = queries_shape[1];
  const int width = queries_shape[2];
  const int splits = weighed_shape[1];
  const int group = query_heads / heads;
  const int number = n % (group * width);
  const int slot = n / (group * width) / heads;
  const int head = n / (group * width) % heads;
  const int d = lane;
  const long first = static_cast<long>(n) * splits;
  float highest = weighed[2 * first];
  for (int s = 1; s < splits; ++s) {
    if (weighed[2 * (first + s)] > highest) highest = weighed[2 * (first + s)];
  }
  float whole = 0.0f;
  float weights = 0.0f;
  for (int s = 0; s < splits; ++s) {
    const float fade = EXP(weighed[2 * (first + s)] - highest);
    whole += fade * partly[(first + s) * D + d];
    weights += fade * weighed[2 * (first + s) + 1];
  }
  const long at = static_cast<long>(slot * width + number % width) * query_heads + head * group;
  mixed[(at + number / width) * D + d] = static_cast<TQ>(whole / weights);
"""

PUT = """
  // Four numbers of one position of one head: lane is their place in the vector, row the position.
  const int heads = keys_shape[1];
  const int width = keys_shape[2];
  const int slot = n / heads;
  const int place = row - (places[3 * slot + 1] - places[3 * slot]);
  const bool is_new = place >= 0 && place < width;
  const long to = (static_cast<long>(n) * tail_keys_shape[2] + row) * D + 4 * lane;
  const long from = is_new ? (static_cast<long>(n) * width + place) * D + 4 * lane : to;
  Four<T> key = FOUR(T, (is_new ? keys : tail_keys) + from);
  Four<T> value = FOUR(T, (is_new ? values : tail_values) + from);
  for (int i = 0; i < 4; ++i) {
    key.at[i] = static_cast<T>(FINITE(static_cast<float>(key.at[i])));
    value.at[i] = static_cast<T>(FINITE(static_cast<float>(value.at[i])));
  }
  PUT_FOUR(T, new_keys + to) = key;
  PUT_FOUR(T, new_values + to) = value;
"""

_PREPARE = """
  // A warp has one vector of a slot: of a query, or of one position of one head's tail.
  constexpr int half_turned = Turned / 2;
  const int width = projected_shape[1];
  const int tail = tail_keys_shape[2];
  const int asked = Hq * width;
  if (row >= asked + H * tail) return;
  const bool is_query = row < asked;
  const int head = is_query ? row / width : (row - asked) / tail;
  const int index = (row - asked) % tail;
  const int t = is_query ? row % width : index - (places[3 * n + 1] - places[3 * n]);
  const long vectors = is_query ? static_cast<long>(n) * asked + row
                                : (static_cast<long>(n) * H + head) * tail + index;
  const long to = vectors * D;
  if (t < 0 || t >= width) {
    for (int e = 4 * lane; e < D; e += 4 * Simd) {
      PUT_FOUR(T, new_keys + to + e) = FOUR(T, tail_keys + to + e);
      PUT_FOUR(T, new_values + to + e) = FOUR(T, tail_values + to + e);
    }
    return;
  }
  const long line = (static_cast<long>(n) * width + t) * Total;
  const long from = line + (is_query ? head * Stride : Hq * Stride + head * D);
  NORM
  #define AT(e) NORMED(static_cast<float>(projected[from + (e)]), e)
  const float position = static_cast<float>(places[3 * n + 2] + t);
  for (int e = lane; e < D; e += Simd) {
    float out = AT(e);
    if (e < Turned) {
      const int pair = Traditional ? e / 2 : e % half_turned;
      const bool is_first = Traditional ? e % 2 == 0 : e < half_turned;
      const int other = Traditional ? (is_first ? e + 1 : e - 1)
                                    : (is_first ? e + half_turned : e - half_turned);
      const float angle = position * (1.0f / periods[pair]);
      const float across = static_cast<float>(static_cast<T>(FACTOR * AT(other)));
      out = static_cast<float>(static_cast<T>(FACTOR * out));
      out = out * COS(angle) + (is_first ? -across : across) * SIN(angle);
    }
    if (is_query) {
      queries[to + e] = static_cast<T>(out);
    } else {
      const float value = static_cast<float>(projected[from + H * D + e]);
      new_keys[to + e] = static_cast<T>(FINITE(out));
      new_values[to + e] = static_cast<T>(FINITE(value));
    }
  }
"""

_NORM = """
  float squares = 0.0f;
  for (int e = lane; e < D; e += Simd) {
    const float x = static_cast<float>(projected[from + e]);
    squares += x * x;
  }
  for (int offset = Simd / 2; offset > 0; offset /= 2) squares += ACROSS(squares, offset);
  const float inverse = RSQRT(squares / D + EPSILON);
  #define WEIGHT(e) static_cast<float>(is_query ? query_norm[e] : key_norm[e])
  #define NORMED(x, e) static_cast<float>(static_cast<T>( \\
      static_cast<float>(static_cast<T>((x) * inverse)) * WEIGHT(e)))
"""

_NO_NORM = """
  #define NORMED(x, e) (x)
"""


def finite(code: str, largest: float) -> str:
    """A source whose ``FINITE`` is MLX's ``nan_to_num`` for numbers up to ``largest``."""
    limit = f"{largest!r}f"
    macro = (
        f"  #define FINITE(x) ((x) != (x) ? 0.0f"
        f" : (x) > {limit} ? {limit} : (x) < -{limit} ? -{limit} : (x))\n"
    )
    return macro + code


@cache
def prepare(largest: float, *, factor: float = 1.0, epsilon: float | None = None) -> str:
    """The source of the kernel that norms and rotates queries and keys and writes the tail.

    Args:
        largest: number of the type.
        factor: of the rotation.
        epsilon: of the norms; None for none.
    """
    norm = _NO_NORM if epsilon is None else _NORM.replace("EPSILON", f"{epsilon!r}f")
    return finite(_PREPARE.replace("NORM\n", norm, 1).replace("FACTOR", f"{factor!r}f"), largest)


@cache
def attend(
    scale: float,
    *,
    softcap: float = 0.0,
    sinks: bool = False,
    parts: bool = False,
    paged: bool = False,
) -> str:
    """The source of the kernel that attends. It contains its factors, as `gated_code` does.

    Args:
        sinks: whether queries have sinks.
        parts: whether several blocks share the positions.
        paged: whether bodies are pages.
    """
    capacity, in_body = _PAGED if paged else _WHOLE
    parts_of = {
        "SCALE": f"{scale!r}f",
        "CAP": f"score = {softcap!r}f * tanh(score / {softcap!r}f);" if softcap else "",
        "SINK": _SINK if sinks else "",
        "ROOM": f"const int capacity = {capacity};",
        "FETCH": _FETCH.replace("IN_BODY", in_body),
        "WRITE": _WRITE_PART if parts else _WRITE,
    }
    code = _BODY
    for name, part in parts_of.items():
        code = code.replace(name, part)
    return code
