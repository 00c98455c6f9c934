"""A Mac for tests: a library in C with the signatures of Apple's headers."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any, ClassVar

# The variables are the tests'. Functions are declared as Apple declares them.
SOURCE = r"""
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int pressure = 1, status = 0, asserted = 0, released = 0;
uint64_t heat = 0, footprint = 0;
double remaining = -2.0;
bool low_power = false;
char kind[64], why[64];

int sysctlbyname(const char *name, void *old, size_t *length, void *new, size_t new_length) {
    if (strcmp(name, "kern.memorystatus_vm_pressure_level") || *length != 4 || new || new_length)
        return -1;
    *(int *)old = pressure;
    return status;
}

struct rusage_info_v0 {
    uint8_t ri_uuid[16];
    uint64_t ri_user_time, ri_system_time, ri_pkg_idle_wkups, ri_interrupt_wkups, ri_pageins,
        ri_wired_size, ri_resident_size, ri_phys_footprint, ri_proc_start_abstime,
        ri_proc_exit_abstime;
};

int proc_pid_rusage(int pid, int flavor, void **buffer) {
    struct rusage_info_v0 *info = (struct rusage_info_v0 *)buffer;
    if (pid < 1 || flavor != 0)
        return -1;
    memset(info, 0xff, sizeof *info);
    info->ri_phys_footprint = footprint;
    return status;
}

uint32_t notify_register_check(const char *name, int *out_token) {
    *out_token = 77;
    return strcmp(name, "com.apple.system.thermalpressurelevel") ? 1 : 0;
}

uint32_t notify_get_state(int token, uint64_t *state) {
    *state = heat;
    return token == 77 ? status : 5;
}

double IOPSGetTimeRemainingEstimate(void) { return remaining; }

const void *CFStringCreateWithCString(const void *allocator, const char *text, uint32_t encoding) {
    return allocator || encoding != 0x08000100 ? NULL : strdup(text);
}

int IOPMAssertionCreateWithName(const void *type, uint32_t level, const void *name, uint32_t *id) {
    if (level != 255)
        return -1;
    strcpy(kind, type);
    strcpy(why, name);
    *id = 0x80000001u + asserted++;
    return status;
}

int IOPMAssertionRelease(uint32_t id) {
    released = id - 0x80000000u;
    return status;
}

void *objc_getClass(const char *name) { return strdup(name); }
void *sel_registerName(const char *name) { return strdup(name); }

void *objc_msgSend(void *self, void *selector) {
    if (!strcmp(self, "NSProcessInfo") && !strcmp(selector, "processInfo"))
        return strdup("the process");
    if (!strcmp(self, "the process") && !strcmp(selector, "isLowPowerModeEnabled"))
        return (void *)(uintptr_t)(0xabcdef00u | low_power);
    abort();
}
"""


def compile_library(folder: Path) -> Path:
    source, library = folder / "mac.c", folder / "mac.so"
    source.write_text(SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, source], check=True)
    return library


class FakeMac:
    """Apple's libraries, all in one. Its variables tell what the machine is like.

    Args:
        library: from `compile_library`.
    """

    _KINDS: ClassVar = {
        **dict.fromkeys(("pressure", "status", "asserted", "released"), ctypes.c_int),
        **dict.fromkeys(("heat", "footprint"), ctypes.c_uint64),
        **dict.fromkeys(("kind", "why"), ctypes.c_char * 64),
        **{"remaining": ctypes.c_double, "low_power": ctypes.c_bool},
    }

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self.opened: list[str] = []

    def load(self, path: str) -> ctypes.CDLL:
        """For `System`."""
        self.opened.append(path)
        return self._library

    def __getitem__(self, name: str) -> Any:
        return self._KINDS[name].in_dll(self._library, name).value

    def __setitem__(self, name: str, value: Any) -> None:
        self._KINDS[name].in_dll(self._library, name).value = value
