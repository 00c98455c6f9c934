// Runs the threads of one group as fibers, lane after lane, and tells the first fault. A fiber stops
// at barriers and simdgroup operations. Of a simdgroup whose lanes wait in different places, those
// at the earliest line go on.

#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

#include "metal.h"
#undef reinterpret_cast

using emulator::Place, emulator::Region, emulator::Turn;

namespace {

constexpr int most_shared = 32768, stack_bytes = 1 << 16, simd = 32;
constexpr int nobody = -1, several = -2;

enum State { ready, at_simd, at_simd_barrier, at_barrier, over };

struct Fiber {
  Place place;
  State state;
  int line, flags, shared;
  char value[16];
  jmp_buf at;
  ucontext_t beginning;
  bool begun;
};

// Who touched an element last; numbers may be `several`.
struct Mark { int group = nobody, lane, simd, epoch, simd_epoch; };
struct Marks { Mark write, read; };

struct Simd { int epoch; Turn turn; };

std::vector<Fiber> fibers;
std::vector<Simd> simds;
std::vector<Region> shared;
Fiber* current;
jmp_buf home;
void (*kernel)(const Region*);
const Region* regions;
char* message;
int group, threads, epochs[2];

// Keeps a fault's text; false.
bool tell(const Fiber& fiber, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int n = vsnprintf(message, 400, format, arguments);
  va_end(arguments);
  const uint* of = fiber.place.threadgroup_position_in_grid;
  snprintf(message + n, 100, " (thread %u of group %u, %u, %u)",
           fiber.place.thread_index_in_threadgroup, of[0], of[1], of[2]);
  return false;
}

// Tells a fault of the running thread and ends the run.
#define fail(...) (tell(*current, __VA_ARGS__), _longjmp(home, 2))

void pause() {
  if (!_setjmp(current->at)) _longjmp(home, 1);
}

void begin() {
  for (;;) {
    kernel(regions);
    current->state = over;
    pause();
  }
}

// Runs a fiber until it waits or is over; false after a fault.
__attribute__((noinline)) bool resume(Fiber& fiber) {
  current = &fiber;
  const int how = _setjmp(home);
  if (how == 0 && current->begun) _longjmp(current->at, 1);
  if (how == 0) {
    current->begun = true;
    setcontext(&current->beginning);
  }
  return how == 1;
}

int index_of(const Fiber& fiber) { return &fiber - fibers.data(); }

// Lets a simdgroup's lanes go on until all wait at a barrier of the whole group, or are over.
bool run_simd(int which) {
  Fiber* const begin = &fibers[which * simd];
  Fiber* const end = &fibers[0] + (threads < (which + 1) * simd ? threads : (which + 1) * simd);
  Simd& group = simds[which];
  for (;;) {
    Fiber* first = nullptr;
    for (Fiber* fiber = begin; fiber < end; ++fiber) {
      if (fiber->state == ready && !resume(*fiber)) return false;
      const bool waits = fiber->state == at_simd || fiber->state == at_simd_barrier;
      if (waits && (!first || fiber->line < first->line)) first = fiber;
    }
    if (!first) return true;
    group.turn.active = 0;
    const State kind = first->state;
    const int line = first->line;
    for (Fiber* fiber = begin; fiber < end; ++fiber) {
      if (fiber->state == kind && fiber->line == line) {
        fiber->state = ready;
        group.turn.active |= 1u << (fiber - begin);
        memcpy(group.turn.value[fiber - begin], fiber->value, 16);
      } else if (kind == at_simd_barrier) {
        return tell(*first, "divergent barrier: line %d is not reached by thread %d", line, index_of(*fiber));
      }
    }
    group.epoch += kind == at_simd_barrier;
  }
}

bool run_group() {
  for (;;) {
    for (int which = 0; which * simd < threads; ++which) {
      if (!run_simd(which)) return false;
    }
    Fiber* first = nullptr;
    for (int i = 0; i < threads && !first; ++i) {
      if (fibers[i].state == at_barrier) first = &fibers[i];
    }
    if (!first) return true;
    const int line = first->line;
    for (int i = 0; i < threads; ++i) {
      if (fibers[i].state != at_barrier || fibers[i].line != line) {
        return tell(*first, "divergent barrier: line %d is not reached by thread %d", line, i);
      }
      fibers[i].state = ready;
    }
    epochs[0] += first->flags & 1;
    epochs[1] += first->flags >> 1 & 1;
  }
}

Mark own_mark(bool is_threadgroup) {
  const Place& place = current->place;
  const int which = place.simdgroup_index_in_threadgroup;
  return {group, static_cast<int>(place.thread_index_in_threadgroup), which, epochs[is_threadgroup],
          simds[which].epoch};
}

// Whether what another thread did is ordered before what `own` does.
bool ordered(const Mark& mark, const Mark& own) {
  if (mark.group == nobody) return true;
  if (mark.group != own.group) return false;
  return mark.epoch < own.epoch || mark.lane == own.lane ||
      (mark.simd == own.simd && mark.simd_epoch < own.simd_epoch);
}

void touch(const Region& region, long element, bool write) {
  Marks& marks = static_cast<Marks*>(region.marks)[element];
  const Mark own = own_mark(region.is_threadgroup);
  const char* does = write ? "writes" : "reads";
  if (!write && marks.write.group == nobody) fail("reads %s[%ld] before it is written", region.name, element);
  if (!ordered(marks.write, own)) {
    fail("race: %s %s[%ld], which thread %d%s wrote, with no barrier between", does, region.name,
         element, marks.write.lane, marks.write.group == group ? "" : " of another group");
  }
  if (write) {
    if (!ordered(marks.read, own)) {
      fail("race: writes %s[%ld], which another thread read, with no barrier between", region.name,
           element);
    }
    marks.write = own;
  } else if (ordered(marks.read, own)) {
    marks.read = own;
  } else {
    marks.read.lane = several;
    if (marks.read.simd != own.simd) marks.read.simd = several;
    if (marks.read.group != own.group) marks.read.group = several;
    marks.read.simd_epoch = own.simd_epoch;
  }
}

void place_threads(int at, const uint* grid, const uint* size) {
  uint groups[3], position[3], inside[3];
  for (int d = 0; d < 3; ++d) groups[d] = (grid[d] + size[d] - 1) / size[d];
  position[0] = at % groups[0];
  position[1] = at / groups[0] % groups[1];
  position[2] = at / groups[0] / groups[1];
  for (int d = 0; d < 3; ++d) {
    const uint left = grid[d] - position[d] * size[d];
    inside[d] = left < size[d] ? left : size[d];
  }
  group = at;
  threads = inside[0] * inside[1] * inside[2];
  for (int i = 0; i < threads; ++i) {
    Place& place = fibers[i].place;
    const uint n = i, own[3] = {n % inside[0], n / inside[0] % inside[1], n / inside[0] / inside[1]};
    for (int d = 0; d < 3; ++d) {
      place.thread_position_in_threadgroup[d] = own[d];
      place.thread_position_in_grid[d] = position[d] * size[d] + own[d];
      place.threadgroup_position_in_grid[d] = position[d];
      place.threads_per_threadgroup[d] = inside[d];
      place.dispatch_threads_per_threadgroup[d] = size[d];
      place.threads_per_grid[d] = grid[d];
      place.threadgroups_per_grid[d] = groups[d];
    }
    place.thread_index_in_threadgroup = i;
    place.thread_index_in_simdgroup = i % simd;
    place.simdgroup_index_in_threadgroup = i / simd;
    place.simdgroups_per_threadgroup = (threads + simd - 1) / simd;
    place.threads_per_simdgroup = place.thread_execution_width = simd;
    fibers[i].state = ready;
    fibers[i].shared = 0;
  }
}

}  // namespace

extern "C" {

void emulator_access(const Region* region, long at, int bytes, bool write) {
  const char* does = write ? "writes" : "reads";
  if (at < 0 || at + bytes > region->bytes) {
    fail("%s outside of %s: element %ld of %ld", does, region->name, at / region->granule,
         region->bytes / region->granule);
  }
  if (!region->marks) fail("%s %d bytes at byte %ld of %s, not aligned", does, bytes, at, region->name);
  for (long e = at / region->granule; e * region->granule < at + bytes; ++e) touch(*region, e, write);
}

const Turn* emulator_meet(int line, const void* value, int bytes) {
  memcpy(current->value, value, bytes);
  current->line = line;
  current->state = at_simd;
  pause();
  return &simds[current->place.simdgroup_index_in_threadgroup].turn;
}

void emulator_absent(int line, int lane) {
  fail("line %d reads lane %d of its simdgroup, which does not take part", line, lane);
}

void emulator_barrier(int line, int flags, bool of_simdgroup) {
  current->line = line;
  current->flags = flags;
  current->state = of_simdgroup ? at_simd_barrier : at_barrier;
  pause();
}

void emulator_index(long index, long size) { fail("index %ld of %ld in threadgroup memory", index, size); }

float emulator_finite(float x) {
  if (!__builtin_isfinite(x)) fail("a fast exponential of %f", x);
  return x;
}

Region* emulator_shared(const char* name, int bytes, int granule) {
  const int which = current->shared++;
  if (which == static_cast<int>(shared.size())) {
    long used = bytes;
    for (const Region& region : shared) used += region.bytes;
    if (used > most_shared) fail("needs %ld bytes of threadgroup memory, of %d", used, most_shared);
    char* base = static_cast<char*>(aligned_alloc(16, (bytes + 15) / 16 * 16));
    memset(base, 0xff, bytes);
    shared.push_back({base, bytes, name, new Marks[bytes / granule], granule, 1});
  }
  return &shared[which];
}

const Place* emulator_place() { return &current->place; }

// The sanitizer's reports; each begins with a file's name, a line and a column.
struct Where { const char* file; uint line, column; };
void __ubsan_handle_out_of_bounds(Where* at, ulong index) {
  fail("line %u: index %ld of a local array", at->line, static_cast<long>(index));
}
void __ubsan_handle_divrem_overflow(Where* at, ulong, ulong) { fail("line %u: divides by zero", at->line); }
void __ubsan_handle_shift_out_of_bounds(Where* at, ulong, ulong) { fail("line %u: shifts too far", at->line); }
void __ubsan_handle_add_overflow(Where* at, ulong, ulong) { fail("line %u: integer overflow", at->line); }
void __ubsan_handle_sub_overflow(Where* at, ulong, ulong) { fail("line %u: integer overflow", at->line); }
void __ubsan_handle_mul_overflow(Where* at, ulong, ulong) { fail("line %u: integer overflow", at->line); }
void __ubsan_handle_negate_overflow(Where* at, ulong) { fail("line %u: integer overflow", at->line); }

// Runs all groups; `text` gets the first fault. Outputs are the last regions.
void emulator_run(void (*of)(const Region*), Region* buffers, int inputs, int outputs,
                  const uint* grid, const uint* size, char* text) {
  kernel = of;
  regions = buffers;
  message = text;
  shared.reserve(64);
  for (Region* out = buffers + inputs; out < buffers + inputs + outputs; ++out) {
    out->marks = new Marks[out->bytes / out->granule];
  }
  const int most = size[0] * size[1] * size[2];
  char* const stacks = static_cast<char*>(malloc(static_cast<size_t>(most) * stack_bytes));
  fibers.assign(most, Fiber{});
  simds.assign((most + simd - 1) / simd, Simd{});
  for (int i = 0; i < most; ++i) {
    getcontext(&fibers[i].beginning);
    fibers[i].beginning.uc_stack = {stacks + static_cast<size_t>(i) * stack_bytes, 0, stack_bytes};
    makecontext(&fibers[i].beginning, begin, 0);
  }
  int groups = 1;
  for (int d = 0; d < 3; ++d) groups *= (grid[d] + size[d] - 1) / size[d];
  for (int at = 0; at < groups && !*text; ++at) {
    place_threads(at, grid, size);
    for (Region& region : shared) {
      memset(region.base, 0xff, region.bytes);
      Marks* marks = static_cast<Marks*>(region.marks);
      for (long e = 0; e < region.bytes / region.granule; ++e) marks[e] = Marks{};
    }
    run_group();
  }
  free(stacks);
  for (Region& region : shared) {
    free(region.base);
    delete[] static_cast<Marks*>(region.marks);
  }
  shared.clear();
  for (Region* out = buffers + inputs; out < buffers + inputs + outputs; ++out) {
    Marks* marks = static_cast<Marks*>(out->marks);
    const long elements = out->bytes / out->granule;
    for (long e = 0; e < elements && !*text; ++e) {
      if (marks[e].write.group == nobody) {
        snprintf(text, 500, "never writes %s[%ld] of %ld", out->name, e, elements);
      }
    }
    delete[] marks;
  }
}
}
