"""What a process does with the memory of its machine that PyTorch gives back."""

import ctypes

_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h
_KEPT = 1 << 30  # bytes
_KEPT_BEFORE = 1 << 25  # what glibc takes at most before 2.35


def keep_freed_memory() -> None:
    """Have this process keep what is freed, to be used again; where the C library is not glibc, nothing happens.

    A training step asks for the memory of the step before. By default glibc gives large pieces of it back to the system
    between the two, which then clears every page of it anew.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    # Either alone would have every large piece mapped anew.
    if mallopt(_MMAP, _KEPT) or mallopt(_MMAP, _KEPT_BEFORE):
        mallopt(_TRIM, _KEPT)
