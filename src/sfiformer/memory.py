"""What a process on a CPU does with the memory that PyTorch gives back."""

import ctypes

_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h
_KEPT = 1 << 30  # bytes


def keep_freed_memory() -> None:
    """Have this process keep what is freed, to be used again; where the C library is not glibc, nothing happens.

    A training step asks for the memory of the step before. By default glibc gives large pieces of it back to the system
    between the two, which then clears every page of it anew.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    for parameter in (_TRIM, _MMAP):
        mallopt(parameter, _KEPT)
