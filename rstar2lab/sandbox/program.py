"""Inside the forked child: run one program as a fresh `__main__`, like a notebook cell.

The last statement, if an expression, is evaluated once and shown; a trailing semicolon silences it.
Errors go to stderr as one line or as a traceback of the program's own frames. Nothing here is a
fence: what the program must not do is refused by `jail` and `slot`.
"""

import ast
import atexit
import builtins
import io
import linecache
import os
import resource
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable

MEMORY_SIGNAL = signal.SIGRTMAX - 3  # a child that ran out of memory ends itself with this signal
PROGRAM_NAME = "<program>"
_MESSAGE_CHARS = 600
_SOURCE_CHARS = 120


def open_streams() -> None:
    """New sys.stdin, stdout and stderr on descriptors 0-2."""
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = sys.__stdout__ = _line_writer(1)
    sys.stderr = sys.__stderr__ = _line_writer(2)


def open_streams_ahead() -> None:
    """The same in the slot, so that children find them; there, too, the outputs are pipes."""
    kept, pipes = [os.dup(1), os.dup(2)], os.pipe()
    for descriptor in (1, 2):
        os.dup2(pipes[1], descriptor)
    open_streams()
    for descriptor, old in zip((1, 2), kept, strict=True):
        os.dup2(old, descriptor)
    for descriptor in (*kept, *pipes):
        os.close(descriptor)


def set_input(descriptor: int | None) -> None:
    """Make it standard input; None: end of file at once."""
    if descriptor is None:
        descriptor = os.open(os.devnull, os.O_RDONLY)
    if descriptor != 0:
        os.dup2(descriptor, 0)
        os.close(descriptor)


def _line_writer(descriptor: int) -> io.TextIOWrapper:
    """Line-buffered, so that output before a kill is not lost; odd characters never raise."""
    raw = open(descriptor, "wb", closefd=False)
    return io.TextIOWrapper(
        raw, encoding="utf-8", errors="backslashreplace", newline="\n", line_buffering=True
    )


def forget_worker() -> None:
    """Make the worker's own modules invisible to programs. They stay alive: `_kept` holds them."""
    for name in [name for name in sys.modules if name.split(".")[0] == "rstar2lab"]:
        _kept.append(sys.modules.pop(name))
    sys.argv, sys.orig_argv = ["program.py"], ["python", "program.py"]


_kept: list[types.ModuleType] = []


def reseed() -> None:
    """Give the child its own random state where numpy is loaded; `random` reseeds at fork."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


class Runner:
    """Runs programs in one namespace; keeps what is needed to report their errors.

    errors: "line" for one short line, "traceback" for the program's own frames.
    """

    def __init__(self, errors: str):
        self.errors = errors
        self.names: set[str] = set()
        self.module = types.ModuleType("__main__")
        self.module.__builtins__ = builtins
        self.namespace = self.module.__dict__

    def enter(self, directory: str) -> None:
        """Become `__main__` of this process and its children, which import from `directory`."""
        _kept.append(sys.modules["__main__"])
        sys.modules["__main__"] = self.module
        sys.path.insert(0, directory)
        threading.excepthook = self._report_thread
        sys.unraisablehook = self._report_thread
        sys.excepthook = lambda kind, error, trace: self.report(error)

    def run(self, source: bytes, name: str = PROGRAM_NAME, echo: bool = True) -> int:
        """Run one program, as a cell (`echo`) or as a script.

        Returns its exit code; `MEMORY_SIGNAL` negated for MemoryError.
        """
        try:
            self._execute(source.decode("utf-8", "surrogatepass"), name, echo)
            return 0
        except SystemExit as error:
            return self._exit_code(error.code)
        except MemoryError as error:
            free_reserve()
            self.report(error)
            return -MEMORY_SIGNAL
        except BaseException as error:  # the boundary: whatever the program raises is its result
            self.report(error)
            return 1
        finally:
            flush()

    def _execute(self, text: str, name: str, echo: bool) -> None:
        self.names.add(name)
        linecache.cache[name] = (len(text), None, _lines(text), name)
        tree = ast.parse(text, name)
        shown = tree.body.pop() if echo and is_shown(tree, text) else None
        if tree.body:
            exec(compile(tree, name, "exec", dont_inherit=True), self.namespace)
        if shown is not None:
            code = compile(ast.Expression(shown.value), name, "eval", dont_inherit=True)
            sys.displayhook(eval(code, self.namespace))

    def _exit_code(self, code: object) -> int:
        if code is None:
            return 0
        if isinstance(code, int):
            return code & 0xFF
        print(code, file=sys.stderr)
        return 1

    def report(self, error: BaseException) -> None:
        """Write the error to stderr."""
        try:
            text = self._line(error) if self.errors == "line" else self._traceback(error)
            sys.stderr.write(text + "\n")
        except Exception:  # a broken __str__, or a closed stderr: the type alone, if possible
            os.write(2, f"{type(error).__name__}\n".encode())

    def _report_thread(self, event) -> None:
        if event.exc_value is not None and not isinstance(event.exc_value, SystemExit):
            self.report(event.exc_value)

    def _line(self, error: BaseException) -> str:
        """`NameError: name 'x' is not defined (line 3: print(x))`"""
        if isinstance(error, SyntaxError) and error.filename in self.names:
            return _with_line(f"{type(error).__name__}: {error.msg}", error.lineno, error.text)
        message = " ".join(traceback.format_exception_only(error)[-1].split())
        message = message.removeprefix("__main__.")
        if len(message) > _MESSAGE_CHARS:
            message = message[:_MESSAGE_CHARS] + "…"
        place = self._innermost(error)
        return _with_line(message, *place) if place else message

    def _innermost(self, error: BaseException) -> tuple[int, str] | None:
        """Line number and text of the program's own line nearest to the error."""
        frames = traceback.walk_tb(error.__traceback__)
        places = [(frame.f_code.co_filename, line) for frame, line in frames]
        own = [place for place in places if place[0] in self.names]
        return (own[-1][1], linecache.getline(*own[-1])) if own else None

    def _traceback(self, error: BaseException) -> str:
        report = traceback.TracebackException.from_exception(error)
        seen: set[int] = set()
        pending = [report]
        while pending:
            part = pending.pop()
            if part is None or id(part) in seen:
                continue
            seen.add(id(part))
            own = [frame for frame in part.stack if frame.filename in self.names]
            part.stack = traceback.StackSummary.from_list(own)
            pending += [part.__cause__, part.__context__, *(part.exceptions or ())]
        return "".join(report.format()).rstrip("\n")


def _with_line(message: str, number: int | None, text: str | None) -> str:
    source = " ".join((text or "").split())
    if len(source) > _SOURCE_CHARS:
        source = source[:_SOURCE_CHARS] + "…"
    if number is None:
        return message
    return f"{message} (line {number}: {source})" if source else f"{message} (line {number})"


def is_shown(tree: ast.Module, text: str) -> bool:
    """True when the last statement is an expression without a semicolon behind it."""
    if not tree.body or not isinstance(tree.body[-1], ast.Expr):
        return False
    last = tree.body[-1]
    line = text.encode("utf-8", "surrogatepass").splitlines()[last.end_lineno - 1]
    return not line[last.end_col_offset :].lstrip().startswith(b";")


def _lines(text: str) -> list[str]:
    """The lines as the parser counts them, each with its end."""
    return io.StringIO(text, newline=None).readlines()


def free_reserve() -> None:
    """Raise the soft memory limit to the hard one, so that a MemoryError can be reported."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def flush() -> None:
    """Flush what the program left in its streams, whatever it did to them."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # closed or replaced by the program: nothing to save
            pass


leave = os._exit


def flush_at_exit() -> None:
    """Let `os._exit` in this process flush first: what was printed before is not lost."""
    os._exit = _exit_of(os.getpid())


def _exit_of(main_process: int) -> Callable[[int], None]:
    def _exit(status: int) -> None:
        if os.getpid() == main_process:
            flush()
        leave(status)

    return _exit


def finish(code: int) -> None:
    """End the process as an interpreter does: wait for threads, run exit handlers, flush."""
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException:  # the exit handlers are the program's: their errors do not count
        pass
    flush()
    if code == -MEMORY_SIGNAL:
        signal.signal(MEMORY_SIGNAL, signal.SIG_DFL)
        os.kill(os.getpid(), MEMORY_SIGNAL)
    leave(code)
