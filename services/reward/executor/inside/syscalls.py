"""System-call tables: allowed, conditional and deadly calls with their numbers.

Unlisted calls fail with EPERM, which programs can survive: for example ``fork``, ``execve``, ``socket``,
``memfd_create`` (its pages escape memory limits), ``chmod`` (Landlock ignores it).

Each entry is a name, its number in Linux's ``asm/unistd_64.h`` (x86_64) and in ``asm-generic/unistd.h`` (aarch64), or
``-`` where it is absent; tested against libseccomp.
"""

MACHINES = ("x86_64", "aarch64")
"""Order of each pair of numbers."""

Numbers = dict[str, tuple[int | None, int | None]]


def _table(text: str) -> Numbers:
    """Read ``name number number, …``.

    >>> _table("open 2 -, openat 257 56")
    {'open': (2, None), 'openat': (257, 56)}
    """
    rows = (entry.split() for entry in text.split(","))
    return {name: (_number(first), _number(second)) for name, first, second in rows}


def _number(text: str) -> int | None:
    return None if text == "-" else int(text)


ALLOWED = _table(
    """
    access 21 -, alarm 37 -, arch_prctl 158 -, brk 12 214, chdir 80 49, clock_getres 229 114, clock_gettime 228 113,
    clock_nanosleep 230 115, close 3 57, close_range 436 436, copy_file_range 326 285, dup 32 23, dup2 33 -,
    dup3 292 24, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21, epoll_pwait 281 22,
    epoll_pwait2 441 441, epoll_wait 232 -, eventfd2 290 19, exit 60 93, exit_group 231 94, faccessat 269 48,
    faccessat2 439 439, fadvise64 221 223, fallocate 285 47, fchdir 81 50, fdatasync 75 83, fstat 5 80,
    fstatfs 138 44, fsync 74 82, ftruncate 77 46, futex 202 98, get_robust_list 274 100, getcpu 309 168,
    getcwd 79 17, getdents64 217 61, getegid 108 177, geteuid 107 175, getgid 104 176, getgroups 115 158,
    getitimer 36 102, getpgid 121 155, getpgrp 111 -, getpid 39 172, getppid 110 173, getpriority 140 141,
    getrandom 318 278, getresgid 120 150, getresuid 118 148, getrlimit 97 163, getrusage 98 165, getsid 124 156,
    gettid 186 178, gettimeofday 96 169, getuid 102 174, lseek 8 62, lstat 6 -, madvise 28 233, mincore 27 232,
    mkdir 83 -, mkdirat 258 34, mmap 9 222, mprotect 10 226, mremap 25 216, msync 26 227, munmap 11 215,
    nanosleep 35 101, newfstatat 262 79, open 2 -, openat 257 56, pause 34 -, pipe 22 -, pipe2 293 59, poll 7 -,
    ppoll 271 73, pread64 17 67, preadv 295 69, pselect6 270 72, pwrite64 18 68, pwritev 296 70, read 0 63,
    readlink 89 -, readlinkat 267 78, readv 19 65, recvfrom 45 207, rename 82 -, renameat 264 38, renameat2 316 276,
    restart_syscall 219 128, rmdir 84 -, rseq 334 293, rt_sigaction 13 134, rt_sigpending 127 136,
    rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigsuspend 130 133, rt_sigtimedwait 128 137,
    sched_get_priority_max 146 125, sched_get_priority_min 147 126, sched_getaffinity 204 123,
    sched_getparam 143 121, sched_getscheduler 145 120, sched_yield 24 124, select 23 -, sendfile 40 71,
    set_robust_list 273 99, set_tid_address 218 96, setitimer 38 103, shutdown 48 210, sigaltstack 131 132, stat 4 -,
    statfs 137 43, statx 332 291, sysinfo 99 179, time 201 -, timerfd_create 283 85, timerfd_gettime 287 87,
    timerfd_settime 286 86, times 100 153, umask 95 166, uname 63 160, unlink 87 -, unlinkat 263 35, wait4 61 260,
    waitid 247 95, write 1 64, writev 20 66
    """
)

CONDITIONAL = _table(
    """
    clone 56 220, clone3 435 435, fcntl 72 25, flock 73 32, ioctl 16 29, kill 62 129, prctl 157 167,
    prlimit64 302 261, sendto 44 206, socketpair 53 199, tgkill 234 131
    """
)

DEADLY = _table(
    """
    acct 163 89, add_key 248 217, bpf 321 280, chroot 161 51, clock_settime 227 112, delete_module 176 106,
    fanotify_init 300 262, finit_module 313 273, fsconfig 431 431, fsmount 432 432, fsopen 430 430, fspick 433 433,
    init_module 175 105, io_uring_enter 426 426, io_uring_register 427 427, io_uring_setup 425 425, ioperm 173 -,
    iopl 172 -, kcmp 312 272, kexec_file_load 320 294, kexec_load 246 104, keyctl 250 219, modify_ldt 154 -,
    mount 165 40, mount_setattr 442 442, move_mount 429 429, open_by_handle_at 304 265, open_tree 428 428,
    perf_event_open 298 241, pidfd_getfd 438 438, pivot_root 155 41, process_madvise 440 440,
    process_vm_readv 310 270, process_vm_writev 311 271, ptrace 101 117, quotactl 179 60, quotactl_fd 443 443,
    reboot 169 142, request_key 249 218, setdomainname 171 162, sethostname 170 161, setns 308 268,
    settimeofday 164 170, swapoff 168 225, swapon 167 224, syslog 103 116, umount2 166 39, unshare 272 97,
    userfaultfd 323 282, vhangup 153 58
    """
)
"""End the program: outcome `forbidden`."""
