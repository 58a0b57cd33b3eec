"""Checks that end in every way, for the tests of the runner."""

import os
import subprocess
import threading

from gpu.check import Check, CheckFailed, CheckSkipped, Context, Figures


def _holds(context: Context) -> Figures:
    return {"device": context.device, "tokens/s": 12345.6}


def _fails(_: Context) -> Figures:
    raise CheckFailed("3 were seen | 4 were expected\nand a second line")


def _cannot(_: Context) -> Figures:
    raise CheckSkipped("no interpreter is known")


def _raises(_: Context) -> Figures:
    raise ValueError("an unknown key")


def _crashes(context: Context) -> Figures:
    """Ends without an answer, and leaves a process behind."""
    left = subprocess.Popen(["sleep", "1000"])
    (context.folder / "left").write_text(str(left.pid))
    os.write(2, b"the last words\n")
    os._exit(9)


def _hangs(_: Context) -> Figures:
    threading.Event().wait()
    return {}


CHECKS = (
    Check(name="holds", shows="A check can hold.", run=_holds),
    Check(name="fails", shows="A check can fail.", run=_fails, needs=("holds",)),
    Check(name="cannot", shows="A check can find that it cannot run.", run=_cannot),
    Check(name="raises", shows="A check can have a fault.", run=_raises),
    Check(name="crashes", shows="A check can end its process.", run=_crashes),
    Check(name="hangs", shows="A check can wait for ever.", run=_hangs, limit_s=1.0),
    Check(name="after_fails", shows="Nothing.", run=_holds, needs=("holds", "fails")),
    Check(name="after_that", shows="Nothing.", run=_holds, needs=("after_fails",)),
    Check(name="with_engine", shows="Nothing.", run=_holds, engine="vllm"),
    Check(name="on_a_gpu", shows="Nothing.", run=_holds, only_gpu="the CPU has no NCCL"),
    Check(name="still_holds", shows="Checks after others run.", run=_holds, needs=("holds",)),
)
