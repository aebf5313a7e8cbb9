"""Turns signals into events, in a thread of its own.

The trap of a Python handler: it runs in the main thread, between any two instructions. `Event.set` there deadlocks if
the main thread holds the event's lock inside `Event.wait`, and the process never ends. So the interpreter only writes
the signal's number to a pipe, and a thread that holds no lock reads it. That also works while the main thread is busy.
"""

import os
import signal
import threading
from collections.abc import Mapping
from types import FrameType


def set_on_signal(events: Mapping[int, threading.Event]) -> None:
    """From now on each of the signals sets its event. Call it once, in the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in events:
        signal.signal(number, _do_nothing)
    threading.Thread(target=_listen, args=(reader, events), name="signals", daemon=True).start()


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """Replaces the default handler, which would end the process."""


def _listen(reader: int, events: Mapping[int, threading.Event]) -> None:
    while True:
        for number in os.read(reader, 512):
            if event := events.get(number):
                event.set()
