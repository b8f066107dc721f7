"""Asks every visible GPU for a context, as a worker that starts does. A program of its own, with nothing but the standard library.

Exits with BUSY if a GPU has none to give for now: under MPS, while what a killed worker left on the GPU is cleared away. Whatever else may
be wrong is for the workers to report.
"""

from __future__ import annotations

import ctypes
import sys

BUSY = 3  # exit code
# Device unavailable; connection to MPS failed, its call failed, server not ready, too many clients, client terminated; unknown.
NOT_NOW = (46, 805, 806, 807, 808, 809, 999)


def main() -> int:
    """0 if all GPUs have answered, however they did."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count, context = ctypes.c_int(), ctypes.c_void_p()
    codes = [cuda.cuInit(0), cuda.cuDeviceGetCount(ctypes.byref(count))]
    codes += [cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) for device in range(count.value)]
    return BUSY if any(code in NOT_NOW for code in codes) else 0


if __name__ == "__main__":
    sys.exit(main())
