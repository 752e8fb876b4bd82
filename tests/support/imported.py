"""Processes that begin with JAX, Flax and Orbax imported, as forks of one that has imported them.

Each import takes a process some three seconds, more than many a toy run. No backend was started
before the fork, so that devices, flags and caches are those of the new process.
"""

import atexit
import multiprocessing
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import time

CONTEXT = multiprocessing.get_context("forkserver")
IMPORTED = ["flax.nnx", "orbax.checkpoint", "examples.train", "examples.trainer.runs.launch"]


class Started:
    """`python -m MODULE ARGUMENTS` in a fork, with as much of `subprocess.Popen` as tests use."""

    def __init__(self, module, arguments, environment, folder):
        CONTEXT.set_forkserver_preload(IMPORTED)
        self._output, output = CONTEXT.Pipe(duplex=False)
        given = (module, arguments, environment, str(folder), output)
        self._process = CONTEXT.Process(target=_run, args=given)
        self._process.start()
        output.close()  # the fork's alone: what is read ends with it
        self._shown = b""

    @property
    def pid(self):
        return self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def kill(self):
        self._process.kill()

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, timeout=None):
        """All that was printed, when the process has ended; and None for errors, printed there."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._output.closed:
            left = None if deadline is None else max(0, deadline - time.monotonic())
            if not select.select([self._output], [], [], left)[0]:
                raise subprocess.TimeoutExpired("a fork", timeout, self._shown)
            block = os.read(self._output.fileno(), 1 << 16)
            self._shown += block
            if not block:
                self._output.close()
        self._process.join()
        return self._shown.decode(), None


def _run(module, arguments, environment, folder, output):
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [module, *arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's, whoever runs tests
    import jax

    jax.config.update("jax_num_cpu_devices", int(environment["JAX_NUM_CPU_DEVICES"]))
    sys.modules.pop(module, None)  # it runs as a script
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:  # a fork leaves these two out
        threading._shutdown()
        atexit._run_exitfuncs()
