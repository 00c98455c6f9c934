"""macOS by its C functions: memory, heat, power, and the assertion that keeps it awake.

The signatures are those of Apple's headers: sys/sysctl.h, libproc.h, notify.h, objc/message.h,
CoreFoundation/CFString.h, IOKit/ps/IOPowerSources.h and IOKit/pwr_mgt/IOPMLib.h. Each call takes
microseconds and starts no process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from ctypes import (
    CDLL,
    POINTER,
    byref,
    c_bool,
    c_char_p,
    c_double,
    c_int,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
    sizeof,
)
from typing import Any

_FRAMEWORKS = "/System/Library/Frameworks/{0}.framework/{0}"

# proc_pid_rusage: the version of its struct, the words in it, and which of them is the footprint.
_VERSION, _WORDS, _FOOTPRINT = 0, 12, 9
_UTF8 = 0x08000100
_LEVEL_ON = 255
# The time remaining on external power. On a battery it is -1, for unknown, or seconds.
_UNLIMITED = -2.0


class System:
    """What macOS tells of this process and this machine. Methods raise OSError.

    Args:
        load: opens a library by its path.

    Raises:
        OSError, AttributeError: if a library or a function is missing.
    """

    def __init__(self, load: Callable[[str], Any] = CDLL) -> None:
        system, objc = load("/usr/lib/libSystem.B.dylib"), load("/usr/lib/libobjc.A.dylib")
        texts, iokit = load(_FRAMEWORKS.format("CoreFoundation")), load(_FRAMEWORKS.format("IOKit"))
        load(_FRAMEWORKS.format("Foundation"))
        size = POINTER(c_size_t)
        self._sysctl = _signed(
            system["sysctlbyname"], c_int, c_char_p, c_void_p, size, c_void_p, c_size_t
        )
        self._usage = _signed(system["proc_pid_rusage"], c_int, c_int, c_int, c_void_p)
        self._state = _signed(system["notify_get_state"], c_uint32, c_int, POINTER(c_uint64))
        self._remaining = _signed(iokit["IOPSGetTimeRemainingEstimate"], c_double)
        self._create = _signed(
            iokit["IOPMAssertionCreateWithName"],
            *(c_int, c_void_p, c_uint32, c_void_p, POINTER(c_uint32)),
        )
        self._release = _signed(iokit["IOPMAssertionRelease"], c_int, c_uint32)
        self._ask = _signed(objc["objc_msgSend"], c_bool, c_void_p, c_void_p)

        self._heat = c_int()
        register = _signed(system["notify_register_check"], c_uint32, c_char_p, POINTER(c_int))
        _check(register, b"com.apple.system.thermalpressurelevel", byref(self._heat))
        text = _signed(texts["CFStringCreateWithCString"], c_void_p, c_void_p, c_char_p, c_uint32)
        self._kind = text(None, b"PreventUserIdleSystemSleep", _UTF8)
        self._why = text(None, b"omlx-worker runs rows", _UTF8)
        named = _signed(objc["objc_getClass"], c_void_p, c_char_p)
        selector = _signed(objc["sel_registerName"], c_void_p, c_char_p)
        get = _signed(objc["objc_msgSend"], c_void_p, c_void_p, c_void_p)
        self._process = get(named(b"NSProcessInfo"), selector(b"processInfo"))
        self._is_low_power = selector(b"isLowPowerModeEnabled")

    def memory_pressure(self) -> int:
        """1 is normal, 2 a warning, 4 critical."""
        level = c_int()
        name, size = b"kern.memorystatus_vm_pressure_level", c_size_t(sizeof(level))
        _check(self._sysctl, name, byref(level), byref(size), None, 0)
        return level.value

    def footprint(self) -> int:
        """Bytes of this process as macOS counts them, those on the GPU included."""
        words = (c_uint64 * _WORDS)()
        _check(self._usage, os.getpid(), _VERSION, words)
        return int(words[_FOOTPRINT])

    def heat(self) -> int:
        """0 is nominal, 1 moderate, 2 heavy, 3 trapping, 4 sleeping."""
        state = c_uint64()
        _check(self._state, self._heat, byref(state))
        return state.value

    def on_battery(self) -> bool:
        """Whether a battery, which may be that of a UPS, is the only source of power."""
        return bool(self._remaining() != _UNLIMITED)

    def low_power(self) -> bool:
        """Whether low-power mode is on."""
        return bool(self._ask(self._process, self._is_low_power))

    def stay_awake(self) -> int:
        """Keep the machine from idle sleep until `let_sleep`, or until this process ends.

        Returns:
            The assertion's id. `pmset -g assertions` lists it.
        """
        held = c_uint32()
        _check(self._create, self._kind, _LEVEL_ON, self._why, byref(held))
        return held.value

    def let_sleep(self, held: int) -> None:
        """Release the assertion with this id."""
        _check(self._release, held)


def _signed(function: Any, result: Any, *arguments: Any) -> Any:
    """The function with its C signature."""
    function.restype, function.argtypes = result, arguments
    return function


def _check(function: Any, *arguments: Any) -> None:
    """Call a function that returns 0 if it succeeds."""
    if status := function(*arguments):
        raise OSError(f"{function.__name__} returned {status}")
