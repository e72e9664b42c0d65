"""Runs modules, each in a fork of this process, which has imported vLLM and nothing of ours.

vLLM, torch and LMCache take 17 s of a core to import. The script imports nothing of `tests`, so
that each copy of the tree uses its own. It reads lines of JSON: ``folder``, ``module``,
``arguments``, ``output`` (a file) and ``anew`` (use a new interpreter), and answers each with a
process id and then its exit status.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib.util
import json
import os
import runpy
import signal
import sys
import threading
import traceback
from contextlib import suppress
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def main(preloaded: list[str]) -> None:
    _end_with_parent()
    del sys.path[0]
    for name in preloaded:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # otherwise each collection in a child would visit all of it
    os.environ.pop("PYTHONHASHSEED", None)  # the simulation's: this process starts with it
    for line in sys.stdin:
        job = json.loads(line)
        process = os.fork()
        if process == 0:
            _exit(_run(**job))
        print(process, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


def _run(folder: str, module: str, arguments: list[str], output: str, anew: bool) -> object:
    _end_with_parent()
    os.setsid()
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ |= {"PYTHONPATH": folder, "COLUMNS": "400"}
    if anew:
        os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
    sys.path.insert(0, folder)
    spec = importlib.util.find_spec("lmcache_connector")
    if spec is None or not str(spec.origin).startswith(folder):
        return f"not the product of {folder}: {spec}"
    if module == "tests.simulation":
        os.environ["PYTHONHASHSEED"] = "0"
        for name in [name for name in sys.modules if name.split(".")[0] == "redis"]:
            del sys.modules[name]  # imported by vLLM; the simulation has its own
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code
    except Exception:  # noqa: BLE001 - the output says it
        traceback.print_exc()
        return 1
    return 0


def _end_with_parent() -> None:
    """However the parent ends: tests would go on for minutes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit(code: object) -> NoReturn:
    """Ends as Python does, without the seconds that unloading vLLM takes."""
    if isinstance(code, str):
        print(code)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else code is not None)


if __name__ == "__main__":
    main(sys.argv[1:])
