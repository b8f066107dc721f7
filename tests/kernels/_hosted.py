"""CUDA sources compiled for the CPU, on tensors of the CPU: one block after the other, and in it one thread after the other, or, if they
wait for each other (`__syncthreads`), all at once.

Numbers of half precision are bf16. What a GPU adds is `tests/gpu`'s.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from torch import Tensor

from carrywave.kernels.cuda import casting, nvrtc

Constants = tuple[tuple[str, int], ...]

# In the place of CUDA's own words, and of half.cuh, which is written in the GPU's assembler.
_BEFORE = """
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>
#include <pthread.h>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(count)
#define __shared__
#define __syncthreads() pthread_barrier_wait(&barrier)
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
struct Place { u32 x, y; };
static thread_local Place threadIdx;
static Place blockIdx, blockDim, gridDim;
static pthread_barrier_t barrier;
static char memory[1 << 16];
static float __uint_as_float(u32 word) { float x; memcpy(&x, &word, 4); return x; }
static u32 bits(float x) { u32 word; memcpy(&word, &x, 4); return word; }
static u32 narrowed(float x) { u32 word = bits(x); return (word + 0x7FFFu + (word >> 16 & 1)) >> 16; }
static u32 pack(float low, float high) { return narrowed(low) | narrowed(high) << 16; }
static void unpack(u32 word, float& low, float& high) { low = __uint_as_float(word << 16); high = __uint_as_float(word & 0xFFFF0000u); }
"""
_AFTER = """
template <typename... Arguments> struct Every {
    template <void (*kernel)(Arguments...)> static void thread(u32 across, u32 down, u32 threads, Arguments... arguments) {
        gridDim.x = across, gridDim.y = down, blockDim.x = threads;
        for (blockIdx.y = 0; blockIdx.y < down; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < across; blockIdx.x++) {
#if TOGETHER
                pthread_barrier_init(&barrier, nullptr, threads);
                std::vector<std::thread> all;
                for (u32 number = 0; number < threads; number++) all.emplace_back([=] { threadIdx.x = number, kernel(arguments...); });
                for (std::thread& each : all) each.join();
                pthread_barrier_destroy(&barrier);
#else
                for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) kernel(arguments...);
#endif
            }
    }
};
template <typename... Arguments> Every<Arguments...> every(void (*)(Arguments...));
"""
_EXPORT = 'extern "C" {{ extern void* const every_{name}; void* const every_{name} = (void*)&decltype(every({name}))::thread<{name}>; }}'


class Hosted:
    """Kernels by the name and constants of their source, for the place of `nvrtc.kernel`; remembers which have run."""

    def __init__(self, folder: Path, names: dict[str, list[str]]) -> None:
        self.folder, self.names = folder, names
        self.ran: list[str] = []
        self._libraries: dict[tuple[str, Constants], ctypes.CDLL] = {}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it, these kernels are launched; a few rows are many enough for a GPU, so that blocks share them or do not."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nvrtc, "kernel", self.kernel)
            patch.setattr(casting, "_ENOUGH", 3)
            yield

    def kernel(self, source: str, name: str, constants: Constants, shared_bytes: int, device: int) -> Callable[..., None]:
        found = ctypes.c_void_p.in_dll(self._library(source, constants), f"every_{name}").value

        def launch(grid: tuple[int, int, int], block: tuple[int, int], *arguments: nvrtc.Argument) -> None:
            self.ran.append(name)
            types = [ctypes.c_int if isinstance(each, int) else ctypes.c_void_p for each in arguments]
            values = [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments]
            run = ctypes.CFUNCTYPE(None, *[ctypes.c_uint] * 3, *types)(found or 0)
            run(*grid[:2], block[0], *values)

        return launch

    def _library(self, source: str, constants: Constants) -> ctypes.CDLL:
        if (source, constants) not in self._libraries:
            compiler = shutil.which("g++") or shutil.which("clang++")
            if compiler is None:
                pytest.skip("no C++ compiler is here")
            text = files("carrywave.kernels").joinpath("source", source).read_text("utf-8").replace('#include "half.cuh"', "")
            exports = [_EXPORT.format(name=name) for name in self.names[source]]
            written = self.folder / f"{Path(source).stem}{len(self._libraries)}.cpp"
            written.write_text("\n".join([_BEFORE, text, _AFTER, *exports]))
            defines = [f"-D{name}={value}" for name, value in (*constants, ("TOGETHER", int("__syncthreads" in text)))]
            out = written.with_suffix(".so")
            command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", "-w", *defines, "-o", str(out), str(written)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            self._libraries[source, constants] = ctypes.CDLL(str(out))
        return self._libraries[source, constants]
