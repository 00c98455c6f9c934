// The names of Metal's language that this project's kernels use, for g++. It includes no mathematics,
// so a name that Metal lacks (expf, rsqrtf) stays unknown. `language.py` writes pointers with address
// spaces as `Pointer<Space, T>`; `runtime.cpp` checks each access.

#include <stdint.h>
#include <type_traits>

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using size_t = ulong;

#define METAL_FUNC inline
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT __FLT_MAX__
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define INT_MAX __INT_MAX__
#define M_PI_F 3.14159265f
#define M_LOG2E_F 1.44269504f
#define M_LN2_F 0.69314718f

namespace emulator {

// What the runtime knows of a buffer, and of the thread that runs.
struct Region {
  char* base;
  long bytes;
  const char* name;
  void* marks;  // null for what is only read
  int granule;  // bytes of an element
  int is_threadgroup;
  mutable long read;  // bytes, however often
};

struct Turn {
  uint active;
  alignas(16) char value[32][16];
};

struct Place {
  uint thread_position_in_grid[3], thread_position_in_threadgroup[3];
  uint threadgroup_position_in_grid[3], threads_per_threadgroup[3], threads_per_grid[3];
  uint threadgroups_per_grid[3], dispatch_threads_per_threadgroup[3];
  uint thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
  uint simdgroups_per_threadgroup, threads_per_simdgroup, thread_execution_width;
};

extern "C" {
void emulator_access(const Region*, long at, int bytes, bool write);
const Turn* emulator_meet(int line, const void* value, int bytes);
void emulator_absent(int line, int lane);
void emulator_barrier(int line, int flags, bool of_simdgroup);
void emulator_index(long index, long size);
float emulator_finite(float x);
Region* emulator_shared(const char* name, int bytes, int granule);
const Place* emulator_place();
}

}  // namespace emulator

// half and bfloat: arithmetic in float, rounded to the nearest even after each operation.
// Nothing but a cast makes a bfloat of another type.
namespace metal {

struct half {
  _Float16 number;
  half() = default;
  template <class N, class = std::enable_if_t<std::is_arithmetic_v<N>>>
  constexpr half(N x) : number(static_cast<_Float16>(static_cast<float>(x))) {}
  constexpr operator float() const { return static_cast<float>(number); }
};

struct bfloat {
  ushort bits;
  bfloat() = default;
  template <class N, class = std::enable_if_t<std::is_arithmetic_v<N> || std::is_same_v<N, half>>>
  explicit constexpr bfloat(N x) : bits(rounded(static_cast<float>(x))) {}
  constexpr operator float() const {
    return __builtin_bit_cast(float, static_cast<uint>(bits) << 16);
  }
  static constexpr ushort rounded(float x) {
    const uint u = __builtin_bit_cast(uint, x);
    if (x != x) return static_cast<ushort>(u >> 16 | 0x40);
    return static_cast<ushort>((u + 0x7fffu + (u >> 16 & 1)) >> 16);
  }
};

template <class N> constexpr bool narrow = std::is_same_v<N, half> || std::is_same_v<N, bfloat>;
template <class N> using Narrow = std::enable_if_t<narrow<N>, N>;
template <class I> using Integer = std::enable_if_t<std::is_integral_v<I>>;

#define OPERATOR(op) \
  template <class N> Narrow<N> operator op(N a, N b) { \
    return N(static_cast<float>(a) op static_cast<float>(b)); \
  } \
  template <class N, class I, class = Integer<I>> Narrow<N> operator op(N a, I b) { return a op N(b); } \
  template <class N, class I, class = Integer<I>> Narrow<N> operator op(I a, N b) { return N(a) op b; } \
  template <class N, class O> Narrow<N>& operator op##=(N& a, O b) { \
    return a = N(static_cast<float>(a) op static_cast<float>(b)); \
  }
OPERATOR(+) OPERATOR(-) OPERATOR(*) OPERATOR(/)
#undef OPERATOR
template <class N> Narrow<N> operator-(N a) { return N(-static_cast<float>(a)); }

}  // namespace metal

namespace emulator {

struct Device {};
struct Constant {};
struct Threadgroup {};

template <class S, class T> struct Reference;

// A pointer into a buffer: `at` bytes after its beginning.
template <class S, class T> struct Pointer {
  const Region* region;
  long at;

  Pointer() = default;
  Pointer(const Region* region, long at) : region(region), at(at) {}
  operator Pointer<S, const T>() const { return {region, at}; }
  template <class U> explicit Pointer(Pointer<S, U> p) : region(p.region), at(p.at) {
    static_assert(std::is_const_v<T> || !std::is_const_v<U>, "casts const away");
  }

  auto operator*() const {
    if constexpr (std::is_const_v<T>) return load();
    else return Reference<S, T>{*this};
  }
  auto operator[](long i) const { return *(*this + i); }
  Pointer operator+(long i) const { return {region, at + i * static_cast<long>(sizeof(T))}; }
  Pointer operator-(long i) const { return *this + -i; }
  Pointer& operator+=(long i) { return *this = *this + i; }
  Pointer& operator++() { return *this += 1; }

  std::remove_const_t<T> load() const {
    check(false);
    region->read += sizeof(T);
    std::remove_const_t<T> value;
    __builtin_memcpy(&value, region->base + at, sizeof(T));
    return value;
  }
  void store(const T& value) const {
    check(true);
    __builtin_memcpy(region->base + at, &value, sizeof(T));
  }
  void check(bool write) const {
    const bool inside = at >= 0 && at + static_cast<long>(sizeof(T)) <= region->bytes;
    if (!inside || at % static_cast<long>(alignof(T)) || region->marks) {
      emulator_access(region, at, sizeof(T), write);
    }
  }
};

template <class S, class T> struct Reference {
  Pointer<S, T> to;
  operator T() const { return to.load(); }
  template <class U, class = std::enable_if_t<!std::is_same_v<U, T>>> explicit operator U() const {
    return static_cast<U>(to.load());
  }
  T operator=(T x) const {
    to.store(x);
    return x;
  }
  T operator=(const Reference& r) const { return *this = static_cast<T>(r); }
  template <class U> T operator+=(U x) const { return *this = static_cast<T>(to.load() + x); }
  template <class U> T operator-=(U x) const { return *this = static_cast<T>(to.load() - x); }
  template <class U> T operator*=(U x) const { return *this = static_cast<T>(to.load() * x); }
  template <class U> T operator/=(U x) const { return *this = static_cast<T>(to.load() / x); }
  Pointer<S, T> operator&() const { return to; }
};

// Threadgroup memory: a number, or a part of an array.
template <class T> struct View : Reference<Threadgroup, T> {
  explicit View(Pointer<Threadgroup, T> to) : Reference<Threadgroup, T>{to} {}
  using Reference<Threadgroup, T>::operator=;
};
template <class T, size_t N> struct View<T[N]> {
  using First = std::remove_all_extents_t<T>;
  Pointer<Threadgroup, First> to;
  explicit View(Pointer<Threadgroup, First> to) : to(to) {}
  View<T> operator[](long i) const {
    if (i < 0 || i >= static_cast<long>(N)) emulator_index(i, N);
    return View<T>({to.region, to.at + i * static_cast<long>(sizeof(T))});
  }
  operator Pointer<Threadgroup, First>() const { return to; }
  operator Pointer<Threadgroup, const First>() const { return to; }
  Pointer<Threadgroup, First> operator+(long i) const { return to + i; }
};
template <class T> struct Shared : View<T> {
  explicit Shared(const char* name)
      : View<T>({emulator_shared(name, sizeof(T), sizeof(std::remove_all_extents_t<T>)), 0}) {}
  using View<T>::operator=;
};

template <class To> struct Recast;
template <class S, class T> struct Recast<Pointer<S, T>> {
  template <class U> static Pointer<S, T> of(Pointer<S, U> p) { return Pointer<S, T>(p); }
};
template <class T> struct Recast<T*> {
  template <class U> static T* of(U* p) { return reinterpret_cast<T*>(p); }
};
template <class To, class From> To recast(From p) { return Recast<To>::of(p); }

// Becomes whatever a kernel declares for a buffer.
struct Buffer {
  const Region* region;
  template <class S, class T> operator Pointer<S, T>() const { return {region, 0}; }
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T> || metal::narrow<T>>>
  operator T() const {
    return Pointer<Constant, const T>(region, 0).load();
  }
};

template <class T> struct Value { using type = T; };
template <class S, class T> struct Value<Reference<S, T>> { using type = T; };
template <class T> struct Value<View<T>> { using type = T; };
template <class T> struct Value<Shared<T>> { using type = T; };
template <class T> using value = typename Value<T>::type;

}  // namespace emulator

#define reinterpret_cast emulator::recast

template <class To, class From> To as_type(From x) { return __builtin_bit_cast(To, x); }

namespace metal {

template <class T, int N> struct vec;
template <class T> struct vec<T, 2> { T x, y; T& operator[](int i) { return (&x)[i]; } };
template <class T> struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  T& operator[](int i) { return (&x)[i]; }
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  T& operator[](int i) { return (&x)[i]; }
};
#define VECTOR_OPERATOR(op) \
  template <class T, int N> vec<T, N> operator op(vec<T, N> a, vec<T, N> b) { \
    for (int i = 0; i < N; ++i) a[i] = a[i] op b[i]; \
    return a; \
  } \
  template <class T, int N> vec<T, N> operator op(vec<T, N> a, T b) { \
    for (int i = 0; i < N; ++i) a[i] = a[i] op b; \
    return a; \
  }
VECTOR_OPERATOR(+) VECTOR_OPERATOR(-) VECTOR_OPERATOR(*) VECTOR_OPERATOR(/)
template <class T, int N> T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; ++i) sum += a[i] * b[i];
  return sum;
}
#define VECTORS(T) using T##2 = vec<T, 2>; using T##3 = vec<T, 3>; using T##4 = vec<T, 4>;
VECTORS(float) VECTORS(half) VECTORS(bfloat) VECTORS(int) VECTORS(uint) VECTORS(ulong)

// Functions of one number. MLX adds those of a bfloat; its result is one too.
#define FUNCTION(name, of_float) \
  inline float name(float x) { return of_float; } \
  inline half name(half h) { const float x = h; return half(of_float); } \
  inline bfloat name(bfloat b) { const float x = b; return bfloat(of_float); }
#define FUNCTIONS \
  FUNCTION(log, __builtin_logf(x)) FUNCTION(log2, __builtin_log2f(x)) \
  FUNCTION(log10, __builtin_log10f(x)) FUNCTION(sqrt, __builtin_sqrtf(x)) \
  FUNCTION(rsqrt, 1.0f / __builtin_sqrtf(x)) FUNCTION(exp2, __builtin_exp2f(x)) \
  FUNCTION(sin, __builtin_sinf(x)) FUNCTION(cos, __builtin_cosf(x)) \
  FUNCTION(abs, __builtin_fabsf(x)) FUNCTION(fabs, __builtin_fabsf(x)) \
  FUNCTION(floor, __builtin_floorf(x)) FUNCTION(ceil, __builtin_ceilf(x)) \
  FUNCTION(rint, __builtin_rintf(x)) FUNCTION(round, __builtin_roundf(x)) \
  FUNCTION(trunc, __builtin_truncf(x))
#define PRECISE FUNCTION(exp, __builtin_expf(x)) FUNCTION(tanh, __builtin_tanhf(x))
#define OF_TYPE(T) \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; } \
  inline T clamp(T x, T low, T high) { return min(max(x, low), high); } \
  inline T select(T no, T yes, bool which) { return which ? yes : no; }
#define OF_FLOATS(T) \
  inline T fmin(T a, T b) { return T(__builtin_fminf(a, b)); } \
  inline T fmax(T a, T b) { return T(__builtin_fmaxf(a, b)); } \
  inline T fma(T a, T b, T c) { return T(__builtin_fmaf(a, b, c)); } \
  inline T pow(T a, T b) { return T(__builtin_powf(a, b)); } \
  inline bool isnan(T x) { return x != x; } \
  inline bool isinf(T x) { return __builtin_isinf(static_cast<float>(x)); }

FUNCTIONS PRECISE
namespace precise { FUNCTIONS PRECISE }
namespace fast {
FUNCTIONS
// As a GPU has them: a fast exponential is a power of two, of a finite number; a fast tangent
// overflows.
FUNCTION(exp, __builtin_exp2f(emulator::emulator_finite(x * M_LOG2E_F)))
FUNCTION(tanh, (fast::exp(2.0f * x) - 1.0f) / (fast::exp(2.0f * x) + 1.0f))
}  // namespace fast
OF_TYPE(float) OF_TYPE(half) OF_TYPE(bfloat) OF_TYPE(short) OF_TYPE(ushort)
OF_TYPE(int) OF_TYPE(uint) OF_TYPE(long) OF_TYPE(ulong)
OF_FLOATS(float) OF_FLOATS(half) OF_FLOATS(bfloat)
inline int abs(int x) { return x < 0 ? -x : x; }

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline mem_flags operator|(mem_flags a, mem_flags b) {
  return static_cast<mem_flags>(static_cast<int>(a) | static_cast<int>(b));
}
inline void threadgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  emulator::emulator_barrier(line, static_cast<int>(flags), false);
}
inline void simdgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  emulator::emulator_barrier(line, static_cast<int>(flags), true);
}

inline int own_lane() { return emulator::emulator_place()->thread_index_in_simdgroup; }

// What each active lane gives, in one simdgroup operation.
template <class T> struct Exchange {
  int line;
  const emulator::Turn* turn;
  Exchange(int line, T x) : line(line), turn(emulator::emulator_meet(line, &x, sizeof(T))) {}
  bool has(int lane) const { return lane >= 0 && lane < 32 && turn->active >> lane & 1; }
  T at(int lane) const {
    if (!has(lane)) emulator::emulator_absent(line, lane);
    T x;
    __builtin_memcpy(&x, turn->value[lane & 31], sizeof(T));
    return x;
  }
  template <class F> T fold(F join) const {
    int lane = 0;
    while (!has(lane)) ++lane;
    T all = at(lane);
    while (++lane < 32) {
      if (has(lane)) all = join(all, at(lane));
    }
    return all;
  }
};

#define SHUFFLE(name, from) \
  template <class T> emulator::value<T> name(T x, ushort by, int line = __builtin_LINE()) { \
    return Exchange<emulator::value<T>>(line, x).at(from); \
  }
SHUFFLE(simd_shuffle, by)
SHUFFLE(simd_broadcast, by)
SHUFFLE(simd_shuffle_xor, own_lane() ^ by)
SHUFFLE(simd_shuffle_down, own_lane() + by)
SHUFFLE(simd_shuffle_up, own_lane() - by)
#define FOLD(name, joined) \
  template <class T> emulator::value<T> name(T x, int line = __builtin_LINE()) { \
    using V = emulator::value<T>; \
    return Exchange<V>(line, x).fold([](V a, V b) { return joined; }); \
  }
FOLD(simd_sum, V(a + b))
FOLD(simd_product, V(a * b))
FOLD(simd_max, max(a, b))
FOLD(simd_min, min(a, b))
FOLD(simd_broadcast_first, a)
inline bool simd_any(bool x, int line = __builtin_LINE()) {
  return Exchange<bool>(line, x).fold([](bool a, bool b) { return a || b; });
}
inline bool simd_all(bool x, int line = __builtin_LINE()) {
  return Exchange<bool>(line, x).fold([](bool a, bool b) { return a && b; });
}

inline float simd_prefix_inclusive_sum(float x, int line = __builtin_LINE()) {
  const Exchange<float> all(line, x);
  float sum = 0.0f;
  for (int lane = 0; lane <= own_lane(); ++lane) sum += all.at(lane);
  return sum;
}

// A matrix that a simdgroup's lanes hold together: two neighbours of a row each, where MLX's
// BaseMMAFrag has them. In which order a GPU adds is not known; here from the first to the last.
template <class T, int Columns, int Rows = Columns> struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "a simdgroup has matrices of 8 x 8");
  vec<T, 2> own;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    for (int i = 0; i < 2; ++i) own[i] = row() == column() + i ? diagonal : T(0);
  }
  vec<T, 2>& thread_elements() { return own; }
  static int row(int lane = own_lane()) { return lane / 16 * 4 + lane / 2 % 4; }
  static int column(int lane = own_lane()) { return lane / 8 % 2 * 4 + lane % 2 * 2; }
  static int lane(int row, int column) {
    return row / 4 * 16 + column / 4 * 8 + row % 4 * 2 + column / 2 % 2;
  }
};
template <class T> using Matrix = simdgroup_matrix<T, 8, 8>;
using simdgroup_float8x8 = Matrix<float>;
using simdgroup_half8x8 = Matrix<half>;
using simdgroup_bfloat8x8 = Matrix<bfloat>;

template <class T, int Columns, int Rows = Columns>
simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T x) {
  simdgroup_matrix<T, Columns, Rows> made;
  for (int i = 0; i < 2; ++i) made.own[i] = x;
  return made;
}

template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(
    Matrix<D>& d, Matrix<A> a, Matrix<B> b, Matrix<C> c, int line = __builtin_LINE()) {
  const Exchange<float4> all(line, {float(a.own[0]), float(a.own[1]), float(b.own[0]), float(b.own[1])});
  for (int i = 0; i < 2; ++i) {
    const int column = d.column() + i;
    float sum = c.own[i];
    for (int k = 0; k < 8; ++k) {
      sum += all.at(d.lane(d.row(), k))[k % 2] * all.at(d.lane(k, column))[2 + column % 2];
    }
    d.own[i] = D(sum);
  }
}
template <class D, class A, class B>
void simdgroup_multiply(Matrix<D>& d, Matrix<A> a, Matrix<B> b, int line = __builtin_LINE()) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)), line);
}

// Where a lane's elements lie in memory; all lanes of the simdgroup take part.
template <class S, class T> emulator::Pointer<S, T> own_element(
    emulator::Pointer<S, T> of, int i, ulong apart, ulong2 origin, bool transposed, int line) {
  const Exchange<bool> all(line, true);
  for (int lane = 0; lane < 32; ++lane) all.at(lane);
  const long row = Matrix<float>::row(), column = Matrix<float>::column() + i;
  const long across = (transposed ? row : column) + origin[0];
  return of + across + ((transposed ? column : row) + origin[1]) * apart;
}
template <class T, class S, class U>
void simdgroup_load(Matrix<T>& d, emulator::Pointer<S, U> from, ulong apart = 8,
                    ulong2 origin = {0, 0}, bool transposed = false, int line = __builtin_LINE()) {
  static_assert(std::is_same_v<std::remove_const_t<U>, T>, "a matrix is loaded from its own type");
  for (int i = 0; i < 2; ++i) d.own[i] = own_element(from, i, apart, origin, transposed, line).load();
}
template <class T, class S>
void simdgroup_store(Matrix<T> a, emulator::Pointer<S, T> to, ulong apart = 8,
                     ulong2 origin = {0, 0}, bool transposed = false, int line = __builtin_LINE()) {
  for (int i = 0; i < 2; ++i) own_element(to, i, apart, origin, transposed, line).store(a.own[i]);
}

}  // namespace metal

using namespace metal;
using emulator::Constant, emulator::Device, emulator::Threadgroup;
using emulator::Pointer, emulator::Reference, emulator::Shared;
using bfloat16_t = bfloat;
using float16_t = half;

// MLX's own, before every kernel.
inline float log1p(float x) {
  const float more = 1.0f + x;
  if (more == INFINITY) return INFINITY;
  return more == 1.0f ? x : x * (metal::log(more) / (more - 1.0f));
}
inline bfloat log1p(bfloat x) { return bfloat(log1p(static_cast<float>(x))); }
