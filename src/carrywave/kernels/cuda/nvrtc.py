"""Compiles this package's CUDA C++ on first use, with NVRTC through cuda-bindings, which torch's CUDA builds install.

No nvcc is needed. Binaries are cached on disk under a hash of everything they depend on, so that only the first run on a machine waits
for the compiler (about a second per variant).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

Argument = Tensor | int | float | None | Sequence[Sequence[Tensor | None]]
Result = TypeVar("Result")


class KernelError(RuntimeError):
    """A kernel could not be compiled, loaded or launched."""


class Replaceable:
    """A kernel that torch's operations can replace. After its first failure it is not tried again, and one warning gives the reason."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.failures: list[str] = []

    def tried(self, work: Callable[[], Result]) -> Result | None:
        """The result of `work`, which may launch the kernel; None if it fails or has failed before."""
        if self.failures:
            return None
        try:
            if missing := available():
                raise KernelError(missing)
            return work()
        except KernelError as error:
            self.failures.append(str(error))
            warnings.warn(f"carrywave's kernel for {self.what} is not used, so steps run slower: {error}", stacklevel=4)
            return None


class Kernel:
    """One function of a compiled source, loaded on one device."""

    def __init__(self, function: Any, shared_bytes: int, device: int) -> None:
        self.function, self.shared_bytes, self.device = function, shared_bytes, device

    def __call__(self, grid: tuple[int, int, int], block: tuple[int, int], *arguments: Argument, cooperative: bool = False) -> None:
        """Launch on the device's current stream. Tensors are passed as pointers, None as a null pointer, numbers as 32-bit ints or
        floats, and rows of tensors as one struct of pointers.
        """
        driver = _driver()
        values, types = zip(*map(_passed, arguments), strict=True)
        launch = driver.cuLaunchCooperativeKernel if cooperative else driver.cuLaunchKernel
        stream = torch.cuda.current_stream(self.device).cuda_stream
        # The driver rejects a cooperative launch whose blocks cannot all be resident at once, so it never hangs.
        extra = () if cooperative else (0,)
        with _context(self.device):
            _check(launch(self.function, *grid, *block, 1, self.shared_bytes, stream, (values, types), *extra))


@cache
def kernel(source: str, name: str, constants: tuple[tuple[str, int], ...], shared_bytes: int, device: int) -> Kernel:
    """A function from one of this package's `.cu` files, compiled with these constants."""
    driver = _driver()
    module = _module(source, constants, device)
    with _context(device):
        function = _check(driver.cuModuleGetFunction(module, name.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        if shared_bytes:
            _check(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
        if dict(constants).get("CLUSTER", 0) > 8:  # larger clusters are not supported by every GPU
            _check(driver.cuFuncSetAttribute(function, driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
    return Kernel(function, shared_bytes, device)


def _passed(argument: Argument) -> tuple[Any, Any]:
    """A value and its type, as the driver's bindings take them."""
    if argument is None or isinstance(argument, Tensor):
        return 0 if argument is None else argument.data_ptr(), ctypes.c_void_p
    if isinstance(argument, int | float):
        return argument, ctypes.c_int if isinstance(argument, int) else ctypes.c_float
    pointers = [_passed(each)[0] for row in argument for each in row]
    return _struct(len(pointers))((ctypes.c_void_p * len(pointers))(*pointers)), None


@cache
def _struct(pointers: int) -> Any:
    """A C struct of so many pointers."""
    return type("Pointers", (ctypes.Structure,), {"_fields_": [("each", ctypes.c_void_p * pointers)]})


def most_clusters(function: Kernel, size: int, threads: int) -> int:
    """How many clusters of this many blocks run at once on the function's device; 0 if it runs none."""
    driver = _driver()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = size, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = function.shared_bytes
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = size, 1, 1
    config.attrs, config.numAttrs = [attribute], 1
    with _context(function.device):
        try:
            return int(_check(driver.cuOccupancyMaxActiveClusters(function.function, config)))
        except KernelError:
            return 0


@cache
def _module(source: str, constants: tuple[tuple[str, int], ...], device: int) -> Any:
    major, minor = torch.cuda.get_device_capability(device)
    architecture = f"sm_{major}{minor}{'a' if major >= 9 else ''}"
    load = _driver().cuModuleLoadData
    with _context(device):
        try:
            return _check(load(binary(source, constants, architecture)))
        except KernelError:  # the file in the cache may be corrupt
            return _check(load(binary(source, constants, architecture, recompile=True)))


@contextlib.contextmanager
def _context(device: int) -> Iterator[None]:
    """Make torch's context for this device current for the driver calls inside. A thread without a context, such as one of autograd's,
    keeps it afterwards, as it would after one of torch's own calls.
    """
    driver, primary = _driver(), _primary(device)
    current = int(_check(driver.cuCtxGetCurrent()))
    if current == 0:
        _check(driver.cuCtxSetCurrent(primary))
    if current in (0, int(primary)):
        yield
        return
    _check(driver.cuCtxPushCurrent(primary))
    try:
        yield
    finally:
        _check(driver.cuCtxPopCurrent())


@cache
def _primary(device: int) -> Any:
    driver = _driver()
    return _check(driver.cuDevicePrimaryCtxRetain(_check(driver.cuDeviceGet(device))))


def binary(source: str, constants: Sequence[tuple[str, int]], architecture: str, *, recompile: bool = False) -> bytes:
    """The machine code, from the cache on disk if it is there, unless `recompile` asks to compile it again."""
    nvrtc = _nvrtc()
    text = _text(source).encode()
    options = [f"--gpu-architecture={architecture}", "--std=c++17", *(f"-D{name}={value}" for name, value in constants)]
    version = _check(nvrtc.nvrtcVersion())
    digest = hashlib.sha256(repr((text, options, version)).encode()).hexdigest()[:32]
    path = _folder() / f"{Path(source).stem}-{digest}.cubin"
    with contextlib.suppress(OSError):  # missing, or not readable by this user
        kept = path.read_bytes()
        if kept[:4] == b"\x7fELF" and not recompile:
            return kept
    program = _check(nvrtc.nvrtcCreateProgram(text, source.encode(), 0, [], []))
    try:
        _check(nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options]))
    except KernelError as error:
        log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        raise KernelError(f"{source} does not compile: {' '.join(log.decode().split())[:400]}") from error
    code = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
    _check(nvrtc.nvrtcGetCUBIN(program, code))
    _write(path, code)
    return bytes(code)


@cache
def available() -> str:
    """Why nothing can be compiled here; empty if compilation works."""
    try:
        _driver(), _check(_nvrtc().nvrtcVersion())
    except (ImportError, KernelError, RuntimeError, OSError) as error:
        return " ".join(str(error).split())[:200] or type(error).__name__
    return ""


def _text(source: str) -> str:
    """A source with this package's includes inlined: a single text for the compiler, and for the cache's hash."""
    text = files("carrywave.kernels").joinpath("source", source).read_text("utf-8")
    return re.sub(r'^#include "([^"]+)"$', lambda match: _text(match[1]), text, flags=re.MULTILINE)


def _folder() -> Path:
    """The cache of compiled kernels, with everything else that can be rebuilt."""
    return Path(os.environ.get("CARRYWAVE_CACHE") or "~/.cache/carrywave").expanduser() / "kernels"


def _write(path: Path, code: bytes) -> None:
    """Write the whole file or nothing; if the disk is not writable, the kernel is just compiled again."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(code)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


@cache
def _nvrtc() -> Any:
    from cuda.bindings import nvrtc

    return nvrtc


def _check(answer: tuple[Any, ...]) -> Any:
    """Return the results of a call of the bindings without its status; raise if that is not success."""
    status, *results = answer
    if int(status) != 0:
        raise KernelError(f"{status.name}")
    return results[0] if len(results) == 1 else tuple(results) or None
