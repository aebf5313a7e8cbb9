"""Signals as events, set by a thread of their own.

The trap of a handler is that it runs inside the main thread, between any two of its instructions: `Event.set` there
waits for ever for the lock that the same thread holds in `Event.wait`, and the process never hears that it should end.
The kernel's own handler only writes a byte, and whoever reads it holds no lock; it also hears while the main thread is
busy with something that takes long.
"""

import os
import signal
import threading
from collections.abc import Mapping
from types import FrameType


def hear(events: Mapping[int, threading.Event]) -> None:
    """From now on each of the signals sets its event. For the main thread, once in a process."""
    ear, mouth = os.pipe()
    os.set_blocking(mouth, False)
    signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
    for number in events:
        signal.signal(number, _leave_it_to_the_ear)
    threading.Thread(target=_listen, args=(ear, events), name="signals", daemon=True).start()


def _leave_it_to_the_ear(_number: int, _frame: FrameType | None) -> None:
    """Only to replace the default, which would end the process."""


def _listen(ear: int, events: Mapping[int, threading.Event]) -> None:
    while True:
        for number in os.read(ear, 512):
            if event := events.get(number):
                event.set()
