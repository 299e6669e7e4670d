"""What a process that runs a kernel may do: compute, read files, and write in folders of its own.

Landlock restricts files, and a seccomp filter denies the system calls that reach the network or
another process. Both hold for the calling thread and all threads and processes that it starts, also
root's, and cannot be lifted. Packages for them wrap libseccomp or serve one of the two; here they
are four system calls.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from attention_kernels.child import end_with_parent, ending
from attention_kernels.errors import AttentionError
from attention_kernels.ladder import build

# Environment variables that name the caches of compilers that a kernel may come from.
CACHES = """CUDA_CACHE_PATH CUPY_CACHE_DIR NUMBA_CACHE_DIR TORCHINDUCTOR_CACHE_DIR
TORCH_EXTENSIONS_DIR TRITON_CACHE_DIR"""
DEVICES = "null", "zero", "full", "*random", "nvidia*", "nvhost*", "nvgpu*", "nvmap", "dxg"
PROC = "self", "sys", "driver", "cpuinfo", "devices", "meminfo", "modules", "stat", "version"

# Landlock: its system calls, the oldest version that can forbid truncation, and rights.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF, LEAST_LANDLOCK = 444, 445, 446, 3
READ, WRITE, EVERYTHING, TO_FILES = 0b1101, 2**14 + 0b10, 2**15 - 1, 2**14 + 0b111
# Seccomp: by machine, the number of its system call and the name of the architecture.
SECCOMP = {"x86_64": (317, 0xC000003E), "aarch64": (277, 0xC00000B7)}
SPEED_AS_BEFORE = 4  # no protection against speculative stores, which would slow kernels down
LOAD, JUMP, IF_EQUAL, IF_AT_LEAST, RETURN = 0x20, 0x05, 0x15, 0x35, 0x06
ALLOW, IGNORE, DENY = 0x7FFF0000, 0x00050000, 0x00050000 | errno.EPERM

# The system calls that are denied, some for most arguments; their numbers on x86-64 and aarch64.
CALLS = """ioctl 16 29 fcntl 72 25 socket 41 198 socketpair 53 199 connect 42 203 kill 62 129
tgkill 234 131 rt_sigqueueinfo 129 138 rt_tgsigqueueinfo 297 240 tkill 200 130
pidfd_send_signal 424 424 pidfd_getfd 438 438 ptrace 101 117 process_vm_readv 310 270
process_vm_writev 311 271 process_madvise 440 440 kcmp 312 272 prlimit64 302 261
setpriority 141 140 bpf 321 280 perf_event_open 298 241 userfaultfd 323 282
io_uring_setup 425 425 sched_setscheduler 144 119 sched_setattr 314 274 sched_setparam 142 118
ioprio_set 251 30 shmget 29 194 shmat 30 196 shmctl 31 195 semget 64 190 semop 65 193 semctl 66 191
semtimedop 220 192 msgget 68 186 msgsnd 69 189 msgrcv 70 188 msgctl 71 187 mq_open 240 180
mq_unlink 241 181 add_key 248 217 request_key 249 218 keyctl 250 219"""
# Calls that do nothing and say that they have: they leave the process group, which is stopped and
# killed as a whole, or change a file's mode, owner, dates or attributes, which landlock allows. So
# ninja, ld and shutil work as usual. 0: aarch64 does not have the call.
IGNORED = """setsid 112 157 setpgid 109 154 chmod 90 0 fchmod 91 52 fchmodat 268 53 utime 132 0
chown 92 0 fchown 93 55 lchown 94 0 fchownat 260 54 utimes 235 0 futimesat 261 0 fchmodat2 452 452
utimensat 280 88 setxattr 188 5 lsetxattr 189 6 fsetxattr 190 7 setxattrat 463 463
removexattr 197 14 lremovexattr 198 15 fremovexattr 199 16 removexattrat 466 466"""

NO_LANDLOCK = "this system has no landlock of Linux 6.2 or later, so it can write to your files"
_libc = ctypes.CDLL(None, use_errno=True)


def missing() -> list[str]:
    """Return why a process of the judge's is not isolated on this system, in sentences."""
    reasons = {
        NO_LANDLOCK: _landlock_version() < LEAST_LANDLOCK,
        "this system has no seccomp, so it can use the network": not _has_seccomp(),
        "it runs as root, of whom nothing is promised": os.geteuid() == 0,
    }
    return [reason for reason, applies in reasons.items() if applies]


def enclose(folder: Path, caches: Path) -> None:
    """Let this process write in `folder`, for temporary files, and in `caches` only.

    It must have no other threads, which would not be restricted.
    """
    assert len(os.listdir("/proc/self/task")) == 1
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
    os.environ |= {name: str(caches / name.lower()) for name in CACHES.split()}
    # Otherwise inductor compiles in a pool, whose locks are in /dev/shm.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    _restrict_files(folder, caches)
    if _has_seccomp():
        _filter_calls()


def apart(work: Callable[[], object]) -> str:
    """Do work in a forked process, which may write in the cache of kernels only.

    Returns the text of its error, or "".
    """
    reader, writer = os.pipe()
    if pid := os.fork():
        os.close(writer)
        with open(reader, encoding="utf-8") as file:
            text = file.read()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return text or (f"its build {ending(code)}" if code else "")
    end_with_parent()
    os.environ["TMPDIR"] = str(cache := build.cache_dir())
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        _restrict_files(cache)
        work()
    except BaseException as error:
        os.write(writer, str(error).encode())
    finally:
        os._exit(0)


def _check(result: int) -> int:
    """Return the result of a system call; raises AttentionError if it failed."""
    if result < 0:
        raise AttentionError(f"it could not be isolated: {os.strerror(ctypes.get_errno())}")
    return result


def _landlock_version() -> int:
    """Return the version of landlock that the system has; below 1 without it."""
    return int(_libc.syscall(CREATE_RULESET, None, 0, 1))


def _restrict_files(*writable: Path) -> None:
    """Allow reading except in /dev and /proc, where little is needed, and some writing."""
    _check(_libc.prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS, also for seccomp
    if _landlock_version() < LEAST_LANDLOCK:
        return
    roots = set(Path("/").iterdir()) - {Path("/dev"), Path("/proc")}
    devices = {path for name in DEVICES for path in Path("/dev").glob(name)}
    ruleset = _check(_libc.syscall(CREATE_RULESET, struct.pack("=Q", EVERYTHING), 8, 0))
    rules = dict.fromkeys(roots, READ) | dict.fromkeys(devices, READ | WRITE)
    rules |= dict.fromkeys((Path("/proc", name) for name in PROC), READ)
    rules[Path("/proc/self")] = READ | WRITE  # CUDA names its threads there
    for path, rights in (rules | dict.fromkeys(writable, EVERYTHING)).items():
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # a broken link, or a file of /proc that this system does not have
            continue
        these = rights if path.is_dir() else rights & TO_FILES
        _check(_libc.syscall(ADD_RULE, ruleset, 1, struct.pack("=Qi", these, fd), 0))
        # A rule is for an inode, and a file of /proc that nobody has open may get another one.
        if path.parts[1] != "proc":
            os.close(fd)
    _check(_libc.syscall(RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def _has_seccomp() -> bool:
    """Return whether this system filters system calls, and their numbers are known."""
    number, _ = SECCOMP.get(platform.machine(), (0, 0))
    action = struct.pack("=I", IGNORE)
    return number > 0 and _libc.syscall(number, 2, 0, action) == 0  # SECCOMP_GET_ACTION_AVAIL


def _filter_calls() -> None:
    """Deny the system calls of _rules(), and ignore others."""
    number, architecture = SECCOMP[platform.machine()]
    program = [(LOAD, 0, 0, 4), (IF_EQUAL, 1, 0, architecture), (RETURN, 0, 0, DENY)]
    # From 2**30 on, x86-64 has the numbers of a second set of calls.
    program += [(LOAD, 0, 0, 0), (IF_AT_LEAST, 0, 1, 2**30), (RETURN, 0, 0, DENY)]
    for call, argument, values, is_allowed in _rules():
        rule = [(LOAD, 0, 0, 16 + 8 * argument)]
        rule += [(IF_EQUAL, len(values) - n, 0, value) for n, value in enumerate(values)]
        rule += [(JUMP, 0, 0, 1)] * (not is_allowed) + [(RETURN, 0, 0, DENY)]
        program += [(LOAD, 0, 0, 0), (IF_EQUAL, 0, len(rule), call), *rule]
    program.append((LOAD, 0, 0, 0))
    for call in _numbers(IGNORED):
        program += [(IF_EQUAL, 0, 1, call), (RETURN, 0, 0, IGNORE)] * (call > 0)
    program += [(RETURN, 0, 0, ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    header = struct.pack("@HP", len(program), ctypes.addressof(code))
    _check(_libc.syscall(number, 1, SPEED_AS_BEFORE, header))  # SECCOMP_SET_MODE_FILTER


def _rules() -> Iterator[tuple[int, int, Sequence[int], bool]]:
    """Yield rules for calls: the number, an argument, and its values that are allowed, or denied.

    io_uring makes other calls, which no filter sees. A socket without a connection could send to
    any address, and a descriptor with an owner, or a terminal that is typed into, acts for others.
    """
    me = os.getpid()
    mine = [(0, [me], True)]
    # SOCK_STREAM and SOCK_SEQPACKET, with SOCK_NONBLOCK and SOCK_CLOEXEC or without.
    connected = [kind + flags for kind in (1, 5) for flags in (0, 0x800, 0x80000, 0x80800)]
    special: dict[str, list[tuple[int, list[int], bool]]] = {
        "socket": [(0, [1], True), (1, connected, True)],  # AF_UNIX
        "socketpair": [(1, connected, True)],
        "prlimit64": [(0, [0, me], True)],
        "setpriority": [(0, [os.PRIO_PROCESS], True), (1, [0, me], True)],
        "fcntl": [(1, [8, 10, 15], False)],  # F_SETOWN, F_SETSIG, F_SETOWN_EX
        # FIOSETOWN, SIOCSPGRP, TIOCSTI, TIOCLINUX
        "ioctl": [(1, [0x8901, 0x8902, 0x5412, 0x541C], False)],
        **{"kill": mine, "tgkill": mine, "rt_sigqueueinfo": mine, "rt_tgsigqueueinfo": mine},
    }
    for name, number in zip(CALLS.split()[::3], _numbers(CALLS), strict=True):
        yield from ((number, *rule) for rule in special.get(name, [(0, [], True)]))


def _numbers(calls: str) -> Iterator[int]:
    """Return the numbers of system calls on this machine."""
    return map(int, calls.split()[1 + [*SECCOMP].index(platform.machine()) :: 3])
