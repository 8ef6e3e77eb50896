"""What a process may still do once it is about to look at hostile input: compute, and answer. Linux only.

Two layers, both kept by the kernel, so nothing that the process later runs can take them off again:
  limits    on memory, processor time, file size, open files (setrlimit), and a timer that ends it (setitimer);
  seccomp   a list of system calls that work; every other one fails with EPERM. No sockets, no new processes or threads,
            no exec, no signals to others, and of files: nothing at all (`Access.NOTHING`), or reading (`Access.READ`).

Standard library only, so that a bare interpreter can import it. Not covered: reading what is already in memory, and
timing. So nothing worth reading may be in that memory: see `code_runner`.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import platform
import resource
import signal
import struct
import sys


class Access(enum.Enum):
    NOTHING = "nothing"  # no file can be opened
    READ = "read"  # files can be opened for reading, and folders listed


class JailUnavailable(RuntimeError):
    """This system cannot lock a process down. Takes exactly one argument: the sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


# System call numbers by machine: (x86_64, aarch64). None: the machine has no such call.
COMPUTE: dict[str, tuple[int | None, int]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sched_yield": (24, 124), "mremap": (25, 216),
    "madvise": (28, 233), "nanosleep": (35, 101), "getpid": (39, 172), "exit": (60, 93), "gettimeofday": (96, 169),
    "getrusage": (98, 165), "times": (100, 153), "sigaltstack": (131, 132), "gettid": (186, 178), "futex": (202, 98),
    "restart_syscall": (219, 128), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "exit_group": (231, 94), "setitimer": (38, 103), "getrandom": (318, 278),
}  # fmt: skip
LOOK: dict[str, tuple[int | None, int]] = {
    "stat": (4, 79), "lstat": (6, 79), "poll": (7, 73), "pread64": (17, 67), "readv": (19, 65), "access": (21, 48),
    "getcwd": (79, 17), "readlink": (89, 78), "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175),
    "getegid": (108, 177), "getdents64": (217, 61), "newfstatat": (262, 79), "readlinkat": (267, 78),
    "faccessat": (269, 48), "fcntl": (72, 25), "uname": (63, 160), "sysinfo": (99, 179), "statx": (332, 291),
    "faccessat2": (439, 439), "sched_getaffinity": (204, 123), "getppid": (110, 173),
}  # fmt: skip
OPENAT = (257, 56)
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
MACHINES = tuple(AUDIT_ARCH)

# Berkeley packet filter, as seccomp runs it over struct seccomp_data {nr, arch, ip, args[6]}
LOAD, JUMP_EQUAL, JUMP_BITS, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
OFFSET_CALL, OFFSET_ARCH, OFFSET_FLAGS = 0, 4, 16 + 8 * 2  # openat's flags are its third argument
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def available() -> bool:
    return sys.platform == "linux" and platform.machine() in MACHINES


def limit(*, memory_bytes: int, cpu_s: float | None, file_bytes: int = 0, open_files: int = 64) -> None:
    """Lower this process's limits for good. `file_bytes` = 0: a file cannot grow by a byte (pipes can)."""
    limits = [
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, open_files),
        (resource.RLIMIT_CORE, 0),
    ]
    if cpu_s is not None:
        limits.append((resource.RLIMIT_CPU, max(1, int(cpu_s + 0.999))))
    for which, value in limits:
        hard = resource.getrlimit(which)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (most, most))


def end_after(duration_s: float) -> None:
    """The process ends itself then, even if nobody is left to end it; 0 calls it off."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, duration_s)


def lock(access: Access) -> None:
    """From here on only the calls listed above work, in this process, for ever. Raises JailUnavailable."""
    if not available():
        raise JailUnavailable(
            f"processes can be locked down on Linux on {' or '.join(MACHINES)}, this is {sys.platform} on "
            f"{platform.machine()}"
        )
    program = _filter(access, platform.machine())
    code = ctypes.create_string_buffer(program, len(program))
    pointer = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))  # struct sock_fprog
    libc = ctypes.CDLL(None, use_errno=True)
    prctl = libc.prctl
    prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    set_no_new_privileges, set_seccomp, mode_filter = 38, 22, 2
    if prctl(set_no_new_privileges, 1, None, 0, 0) or prctl(set_seccomp, mode_filter, pointer, 0, 0):
        raise JailUnavailable(f"this kernel refuses a system call filter: {os.strerror(ctypes.get_errno())}")


def _filter(access: Access, machine: str) -> bytes:
    """The filter as bytes: refuse a foreign machine, allow the listed calls and reading opens, refuse the rest."""
    column = MACHINES.index(machine)
    calls = [numbers[column] for numbers in COMPUTE.values()]
    if access is Access.READ:
        calls += [numbers[column] for numbers in LOOK.values()]
    lines = [
        (LOAD, 0, 0, OFFSET_ARCH),
        (JUMP_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, OFFSET_CALL),
    ]
    for call in sorted({call for call in calls if call is not None}):
        lines += [(JUMP_EQUAL, 0, 1, call), (RETURN, 0, 0, ALLOW)]
    if access is Access.READ:
        lines += [
            (JUMP_EQUAL, 0, 4, OPENAT[column]),
            (LOAD, 0, 0, OFFSET_FLAGS),
            (JUMP_BITS, 1, 0, WRITING),
            (RETURN, 0, 0, ALLOW),
            (RETURN, 0, 0, REFUSE),
        ]
    lines.append((RETURN, 0, 0, REFUSE))
    return b"".join(struct.pack("HBBI", *line) for line in lines)
