"""Steps that must not wait for the device."""

import warnings
from contextlib import contextmanager

import torch


@contextmanager
def waiting_is_an_error():
    """Raises where the host waits for the device; torch's mode is put back whatever happens."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
