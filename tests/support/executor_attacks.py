"""Programs that attack the executor, with the allowed outcomes.

An attack prints what it obtained; if contained, it prints nothing. ``CLEAN`` runs after each and reports traces.
"""

import dataclasses
import json
import sys
import sysconfig

from penstock.shared.executor.protocol import Call, Limits, Outcome

PRELUDE = """
import ctypes, os, signal, socket, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
supervisor, secret, port = {supervisor}, {secret!r}, {port}
packages, base_packages = {packages!r}, {base_packages!r}
def attempt(what, act):
    try:
        got = act()
    except (OSError, AttributeError, MemoryError, ValueError, RuntimeError):
        return
    print(what, repr(got)[:80])
def call(name, *arguments):
    got = getattr(libc, name)(*arguments)
    if got < 0:
        raise OSError(ctypes.get_errno(), name)
    return got
"""
CLEAN = """
import builtins, fcntl, json, os, sys, threading
def can_open(number):
    try:
        return bool(os.fstat(number))
    except OSError:
        return False
def files():
    try:
        return os.listdir("/tmp")
    except OSError:
        return []
def sees():
    return {
        "files": files(),
        "descriptors": [number for number in range(256) if can_open(number)],
        "flags": fcntl.fcntl(2, fcntl.F_GETFL) & (os.O_APPEND | os.O_NONBLOCK),
        "named input": open("/dev/stdin").read(),
        "threads": threading.active_count(),
        "secrets": [name for name in os.environ if "SECRET" in name],
        "marked": hasattr(builtins, "marked") or hasattr(json, "marked"),
        "input": sys.stdin.read(),
        "sum": sum(range(10)),
    }
"""
SEEN = {
    "files": [],
    "descriptors": [0, 1, 2, 3],
    "flags": 0,
    "named input": "mine",
    "threads": 1,
    "secrets": [],
    "marked": False,
    "input": "mine",
    "sum": 45,
}

FINISHED = (Outcome.FINISHED,)
TIMEOUT = (Outcome.TIMEOUT,)
MEMORY = (Outcome.MEMORY,)
FORBIDDEN = (Outcome.FORBIDDEN,)
OUTPUT_LIMIT = (Outcome.OUTPUT_LIMIT,)
ERROR = (Outcome.RUNTIME_ERROR,)


@dataclasses.dataclass(frozen=True, slots=True)
class Attack:
    name: str
    code: str
    ends: tuple[Outcome, ...] = FINISHED
    prints: str | None = ""
    """Allowed output; None: anything."""
    calls: tuple[Call, ...] = ()
    wall_s: float = 30.0
    cpu_s: float = 10.0

    @property
    def limits(self) -> Limits:
        return Limits(wall_s=self.wall_s, cpu_s=self.cpu_s, memory_bytes=256 << 20)


def _loop(name: str, code: str) -> Attack:
    return Attack(name, code, TIMEOUT, None, wall_s=0.5)


def _forbidden(name: str, act: str) -> Attack:
    return Attack(name, f"attempt('got', lambda: {act})", FORBIDDEN)


def _refused(name: str, *acts: str) -> Attack:
    return Attack(name, "\n".join(f"attempt('got', lambda: {act})" for act in acts))


ATTACKS = (
    # ------------------------------------------------------------------ time
    _loop("loops for ever", "while True: pass"),
    _loop("sleeps", "time.sleep(1000)"),
    _loop("sleeps in C", "libc.sleep(1000)"),
    _loop("ignores every signal", "for n in range(1, 64):\n  attempt('', lambda: signal.signal(n, signal.SIG_IGN) and None)\nwhile True: pass"),
    _loop("swallows every exception", "while True:\n  try:\n    time.sleep(1)\n  except BaseException: pass"),
    _loop("waits at its exit", "import atexit; atexit.register(time.sleep, 1000)"),
    _loop("leaves a thread that never ends", "threading.Thread(target=time.sleep, args=(1000,)).start()"),
    _loop("stops itself by a signal of the terminal", "os.kill(os.getpid(), signal.SIGTSTP)\nwhile True: pass"),
    Attack(
        "burns CPU in threads",
        "def burn():\n  while True: pass\nfor _ in range(4): threading.Thread(target=burn).start()",
        TIMEOUT,
        cpu_s=1.0,
    ),
    # ------------------------------------------------------------------ processes
    _refused("forks", "os.fork()"),
    _refused("forks by a raw call", "call('syscall', 56, 17, 0, 0, 0, 0)", "call('syscall', 57)", "call('syscall', 435, 0, 0)"),
    _refused("runs a shell", "os.execv('/bin/sh', ['sh', '-c', 'echo got'])"),
    Attack("calls system", "if os.system('echo got') == 0: print('ran')"),
    Attack("starts a subprocess", "import subprocess\nattempt('got', lambda: subprocess.run(['/bin/echo', 'got']))"),
    _refused("spawns", "os.posix_spawn('/usr/bin/env', ['env'], {})"),
    Attack("uses multiprocessing", "import multiprocessing\nattempt('got', lambda: multiprocessing.Process(target=print).start())"),
    Attack(
        "starts threads without end",
        # not by Thread.start(), which waits for ever if a thread fails for lack of memory before it reports its start
        "import _thread\nthreading.stack_size(1 << 16)\nevent, most = threading.Event(), 0\n"
        "try:\n  for _ in range(1000):\n    _thread.start_new_thread(event.wait, ()); most = max(most, _thread._count())\n"
        "except RuntimeError: pass\nif most > 300: print(most)\nos._exit(0)",
        FINISHED + MEMORY,  # each thread may need address space of its own
    ),
    _refused("becomes a daemon", "os.setsid()", "os.fork()"),
    # ------------------------------------------------------------------ memory
    Attack("takes 10 GB", "block = bytearray(10 << 30)", MEMORY),
    Attack("takes it in small pieces", "blocks = []\nwhile True: blocks.append(bytearray(1 << 20))", MEMORY),
    Attack("takes it in one list", "numbers = [0] * (1 << 28)", MEMORY),
    Attack("maps shared memory", "import mmap\nattempt('got', lambda: mmap.mmap(-1, 1 << 30))"),
    _refused("takes pages of a memory file", "os.memfd_create('x')", "call('syscall', 319, b'x', 0)", "call('syscall', 447, 0)"),
    _refused("takes System V memory", "call('shmget', 0, 1 << 20, 0o1600)", "call('msgget', 0, 0o1600)"),
    Attack(
        "raises its limits",
        "import resource\nfor kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NOFILE):\n"
        "  attempt('got', lambda: resource.setrlimit(kind, (-1, -1)) or 'raised')",
    ),
    Attack("recurses deeply", "sys.setrecursionlimit(1 << 30)\ndef f(n): return f(n + 1)\nf(0)", MEMORY + ERROR + TIMEOUT, cpu_s=1.0),
    Attack("breaks its own memory", "ctypes.string_at(0)", ERROR),
    # ------------------------------------------------------------------ files
    Attack(
        "fills the disk with one file",
        "total = 0\ntry:\n  with open('/tmp/x', 'wb') as file:\n    while True: total += file.write(bytes(1 << 20))\n"
        "except OSError: pass\nif total > 17 << 20: print(total)",
    ),
    Attack(
        "fills it with small files",
        "count = 0\ntry:\n  while True:\n    open(f'/tmp/{count}', 'w').close(); count += 1\nexcept OSError: pass\nif count > 64: print(count)",
    ),
    _refused("makes a huge sparse file", "os.truncate(os.open('/tmp/x', os.O_CREAT | os.O_RDWR), 1 << 40)"),
    _refused("reads the password file", "open('/etc/passwd').read()", "open('/etc/shadow').read()", "open('/etc/hostname').read()"),
    _refused("reads the host's secret", "open(secret).read()", "os.open(secret, os.O_RDONLY)"),
    Attack(
        "reads it through a link",
        "attempt('', lambda: os.symlink(secret, '/tmp/link'))\nattempt('', lambda: os.link(secret, '/tmp/hard'))\n"
        "attempt('got', lambda: open('/tmp/link').read())\nattempt('got', lambda: open('/tmp/hard').read())",
    ),
    _refused("writes on the host", "open(secret, 'a').write('x')", "open('/var/tmp/got', 'w')", "open('/dev/shm/got', 'w')"),
    _refused("changes a file's mode", "os.chmod(secret, 0o777) or 'done'", "os.chown(secret, 0, 0) or 'done'", "os.utime(secret) or 'done'"),
    Attack(
        "poisons the standard library",
        "import json\nfor path in (json.__file__, os.__file__):\n  attempt('got', lambda: open(path, 'a').write('x'))\n"
        "  attempt('got', lambda: os.unlink(path) or 'gone')\njson.marked = True",
    ),
    Attack("leaves files behind", "try: open('/tmp/mine', 'w').write('x')\nexcept OSError: pass"),
    Attack("marks what it shares", "import builtins, json\nbuiltins.marked = json.marked = True"),
    _refused("makes a device", "os.mknod('/tmp/x', 0o60600, 0) or 'made'", "os.mkfifo('/tmp/f') or 'made'"),
    # ------------------------------------------------------------------ what others hold
    Attack("reads the environment", "for name in os.environ:\n  if name.startswith('PENSTOCK') or 'SECRET' in name: print(name)"),
    _refused(
        "reads the environments of others",
        "open(f'/proc/{supervisor}/environ', 'rb').read()",
        "open(f'/proc/{os.getppid()}/environ', 'rb').read()",
        "open('/proc/1/environ', 'rb').read()",
        "open('/proc/self/environ', 'rb').read()",
    ),
    Attack("lists processes", "try:\n  for name in os.listdir('/proc'): print(name)\nexcept OSError: pass"),
    Attack(
        "uses descriptors that were left open",
        "for number in range(4, 4096):\n  try: os.fstat(number)\n  except OSError: continue\n  print(number)",
    ),
    _refused("writes its own input", "os.write(0, b'x')", "os.ftruncate(0, 10) or 'done'"),
    _refused(
        "writes its own input by its name",
        "os.write(os.open('/dev/stdin', os.O_RDWR), b'x')",
        "os.ftruncate(os.open('/dev/stdin', os.O_RDWR), 10) or 'done'",
        "os.unlink('/proc/self/fd/0') or 'gone'",
    ),
    _refused("reaches others by the name of its input", "os.listdir('/proc/self/fd')", "os.listdir('/proc/self')", "open('/proc/self/fd/../environ').read()", "open('/proc/self/fd/0/../../environ').read()"),
    Attack(
        "changes flags of standard error",
        "import fcntl\nfcntl.fcntl(2, fcntl.F_SETFL, os.O_APPEND | os.O_NONBLOCK)\nif not fcntl.fcntl(2, fcntl.F_GETFL) & os.O_APPEND: print('not even its own')",
    ),
    _loop(
        "locks what the host has",
        "import fcntl, json\nfor path in ('/dev/null', json.__file__):\n  file = os.open(path, os.O_RDONLY)\n  fcntl.flock(file, fcntl.LOCK_EX)\n  fcntl.lockf(file, fcntl.LOCK_SH)\n"
        "fcntl.flock(2, fcntl.LOCK_EX)\nfcntl.lockf(2, fcntl.LOCK_EX)\nwhile True: pass",
    ),
    Attack(
        "reads locks of others",
        "import fcntl, json, struct\nasked = struct.pack('hhqqi', fcntl.F_WRLCK, 0, 0, 0, 0)\n"
        "for number in (5, 36, 37):\n  attempt('got', lambda: fcntl.fcntl(os.open(json.__file__, os.O_RDONLY), number, asked))",
    ),
    Attack(
        "reads installed packages",
        "import glob, sysconfig\nfor folder in {*glob.glob('/usr/lib/python3*/*-packages'), *glob.glob('/usr/local/lib/python3*/*-packages'), packages, base_packages}:\n"
        "  try: print(*os.listdir(folder), end='')\n  except OSError: pass\n  attempt('read', lambda: open(folder + '/msgpack/__init__.py').read())\n"
        "  attempt('read', lambda: open(folder + '/pip/__init__.py').read())\n  sys.path.append(folder)\n"
        "for name in ('msgpack', 'pip', 'pydantic'):\n  try: __import__(name); print(name)\n  except (ImportError, OSError): pass",
    ),
    # ------------------------------------------------------------------ signals
    _refused("signals others", *(f"os.kill({pid}, {number}) or 'sent'" for pid in ("supervisor", "os.getppid()", "-1", "0") for number in (0, 9))),
    _refused("signals by pid descriptor", "signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9) or 'sent'"),
    Attack("ends as if the host had killed it", "attempt('got', lambda: os.kill(os.getpid(), 9) or 'sent')\nattempt('got', lambda: call('syscall', 234, os.getpid(), os.getpid(), 9))\nos._exit(9)", ERROR),
    Attack("ends as if it had never begun", "os.write(3, b'error no namespaces\\n')\nos._exit(1)", ERROR),
    # ------------------------------------------------------------------ network
    _refused("connects to the host", "socket.create_connection(('127.0.0.1', port), 1)", "socket.create_connection(('127.0.0.1', port))"),
    _refused("opens sockets", *(f"socket.socket({family}, {kind})" for family in (1, 2, 10, 16, 17, 40) for kind in (1, 2, 3))),
    _refused("asks for a name", "socket.getaddrinfo('example.org', 80)"),
    Attack(
        "sends from a pair of sockets",
        "attempt('got', lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', '\\0name'))\n"
        "attempt('got', lambda: socket.socketpair()[0].sendto(b'x', '\\0name'))",
    ),
    # ------------------------------------------------------------------ the kernel
    _forbidden("traces another process", "call('ptrace', 16, supervisor, 0, 0)"),
    _forbidden("reads another's memory", "call('process_vm_readv', supervisor, 0, 0, 0, 0, 0)"),
    _forbidden("takes another's descriptors", "call('syscall', 438, 3, 0, 0)"),
    _forbidden("enters namespaces", "call('unshare', 0x10000000)"),
    _forbidden("joins namespaces", "call('setns', 0, 0)"),
    _forbidden("mounts", "call('mount', b'none', b'/tmp', b'tmpfs', 0, None)"),
    _forbidden("unmounts what hides the rest", "call('umount2', b'/proc', 2)"),
    _forbidden("changes its root", "os.chroot('/tmp')"),
    _forbidden("uses io_uring", "call('syscall', 425, 8, 0)"),
    _forbidden("uses bpf", "call('syscall', 321, 0, 0, 0)"),
    _forbidden("uses keys", "call('syscall', 250, 0, 0, 0)"),
    _forbidden("watches performance", "call('syscall', 298, 0, 0, 0, 0, 0)"),
    Attack("calls as another machine", "call('syscall', 0x40000000 + 39)", FORBIDDEN),
    _refused("becomes root", "os.setuid(0) or 'done'", "os.setgid(0) or 'done'", "os.setgroups([0]) or 'done'"),
    _refused("undoes its confinement", "call('prctl', 1, 0)", "call('prctl', 4, 1)", "call('prctl', 22, 0)", "call('capset', None, None)"),
    _refused("types at the terminal", "__import__('fcntl').ioctl(0, 0x5412, b'x')"),
    _refused("disturbs other cores", "call('syscall', 324, 8, 0, 0) or 'done'", "os.sched_setaffinity(0, range(64)) or 'done'", "os.setsid()"),
    _refused("asks for more of the host", "os.nice(-5)", "os.sched_setaffinity(0, [0]) or 'done'", "os.setpriority(0, 0, -5) or 'done'"),
    # ------------------------------------------------------------------ output
    Attack("prints 3 GB", "line = 'x' * (1 << 20)\nfor _ in range(3000): print(line)", OUTPUT_LIMIT, None),
    Attack("prints slowly but without end", "while True: os.write(1, b'x' * 4096)", OUTPUT_LIMIT, None),
    Attack("floods the report", "while True: os.write(3, b'value 1\\n' * 1000)", OUTPUT_LIMIT),
    Attack("returns too much", "def f(): return 'x' * (2 << 20)", OUTPUT_LIMIT, calls=(Call("f"),)),
    # ------------------------------------------------------------------ rewards for nothing
    Attack("leaves before it returns", "def f(): os._exit(0)", ERROR, calls=(Call("f"),)),
    Attack("exits before it returns", "def f(): sys.exit(0)", ERROR, calls=(Call("f"),)),
    Attack("leaves at once", "sys.exit(0)\ndef f(): return 3", ERROR, calls=(Call("f"),)),
    Attack(
        "returns what equals everything",
        "class Any:\n  def __eq__(self, other): return True\n  __hash__ = object.__hash__\ndef f(): return Any()",
        ERROR,
        calls=(Call("f"),),
    ),
    Attack("hides it in a list", "class Any:\n  def __eq__(self, other): return True\ndef f(): return [Any()]", ERROR, calls=(Call("f"),)),
    Attack("returns a value that is no JSON", "def f(): return {1, 2}", ERROR, calls=(Call("f"),)),
    Attack("returns a value too deep to read", "def f():\n  found = []\n  for _ in range(100000): found = [found]\n  return found", ERROR, calls=(Call("f"),)),
)  # fmt: skip


def prelude(supervisor: int, secret: str, port: int) -> str:
    return PRELUDE.format(
        supervisor=supervisor,
        secret=secret,
        port=port,
        packages=sysconfig.get_path("purelib"),
        base_packages=sysconfig.get_path("purelib", vars={"base": sys.base_prefix, "platbase": sys.base_prefix}),
    )


def clean_calls() -> tuple[Call, ...]:
    return (Call("sees"),)


def readable(value: object) -> str:
    return json.dumps(value, sort_keys=True)
