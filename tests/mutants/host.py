"""Runs modules, each in a process forked from this one: vLLM is imported, and nothing of ours.

vLLM, torch and LMCache take 17 s of a core to import. This is a script of its own, so that nothing
of `tests` is imported from the tree it lies in. It takes lines of JSON: ``folder``, ``module``,
``arguments``, ``output`` (a file) and ``anew``, whether in a new interpreter. It answers each with
the number of the process, and then with its exit status.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from contextlib import suppress


def main(preloaded: list[str]) -> None:
    del sys.path[0]
    for name in preloaded:
        with suppress(ImportError):
            importlib.import_module(name)
    os.environ.pop("PYTHONHASHSEED", None)  # of this process: the simulation needs one, no child
    for line in sys.stdin:
        job = json.loads(line)
        process = os.fork()
        if process == 0:
            _run(**job)
            return
        print(process, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


def _run(folder: str, module: str, arguments: list[str], output: str, anew: bool) -> None:
    os.setsid()
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ |= {"PYTHONPATH": folder, "COLUMNS": "400"}
    if anew:
        os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
    sys.path.insert(0, folder)
    if module == "tests.simulation":
        os.environ["PYTHONHASHSEED"] = "0"
        for name in [name for name in sys.modules if name.split(".")[0] == "redis"]:
            del sys.modules[name]  # vLLM has imported it, and the simulation has its own
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
