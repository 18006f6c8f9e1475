"""The stub of CUDA: libraries that claim eight GPUs and compute nothing, generated from a CUDA package of PyPI.

``libcudart.so.13`` exports every symbol of the real one under its symbol version, ``libcuda.so.1`` every function that
``cuda.h`` declares. Prototypes are those of the headers, so that the compiler checks the answers of ``stub_answers``.
Every function counts its calls: ``fake_cuda_calls`` returns them, 0 for a name that is not there.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.cuda import stub_answers
from tests.cuda.stub_answers import Prototype

RUNTIME, DRIVER = "libcudart.so.13", "libcuda.so.1"
CUBLAS, CUBLASLT = "libcublas.so.13", "libcublasLt.so.13"
_PROTOTYPE = re.compile(r"\b(cudaError_t|CUresult|const char\s*\*)\s+(cu\w+)\s*\(([^;{}]*)\)\s*;")
_SYMBOL = re.compile(r"^[0-9a-f]+ T (\w+?)(?:@@?(\S+))?$", re.MULTILINE)


class StubError(Exception):
    """The stub cannot be built here; the message names the command that mends it."""


class Library(NamedTuple):
    """The contents of a stub."""

    file: str
    header: str
    symbols: tuple[str, ...]
    answers: Mapping[str, str]
    helpers: str
    symbol_version: str = ""


def build_stub(package: Path, cache: Path) -> Path:
    """Return the folder of the two libraries for the CUDA package at ``package`` (``nvidia/cu13``), built once.

    Raises:
        StubError: There is no compiler, or the package has no runtime or headers.
    """
    real, include = package / "lib" / RUNTIME, package / "include"
    for path in (real, include / "cuda_runtime_api.h", include / "cuda.h"):
        if not path.is_file():
            raise StubError(f"the CUDA package has no {path}: remove {cache} and run make test-cuda again")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or shutil.which("nm") is None:
        raise StubError("the stub of CUDA is compiled with gcc, which is missing here: apt-get install gcc libc6-dev")
    sources = [Path(__file__), Path(stub_answers.__file__)]
    key = hashlib.sha256(b"".join(path.read_bytes() for path in [*sources, real])).hexdigest()[:12]
    folder = cache / f"stub-{key}"
    if folder.is_dir():
        return folder
    declared = read_prototypes(compiler, include, "cuda.h")
    libraries = [
        _stand_in(real, "cuda_runtime_api.h", stub_answers.RUNTIME_ANSWERS, stub_answers.RUNTIME_HELPERS),
        Library(DRIVER, "cuda.h", tuple(declared), stub_answers.DRIVER_ANSWERS, stub_answers.DRIVER_HELPERS),
        # Their headers include one that no package of torch's brings.
        _stand_in(real.with_name(CUBLAS), "", stub_answers.CUBLAS_ANSWERS),
        _stand_in(real.with_name(CUBLASLT), "", stub_answers.CUBLASLT_ANSWERS),
    ]
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        for library in libraries:
            _compile(compiler, include, library, Path(scratch))
        built = Path(scratch) / "built"
        built.mkdir()
        for library in libraries:
            (Path(scratch) / library.file).rename(built / library.file)
        try:
            built.rename(folder)
        except OSError:
            # Another process was faster.
            if not folder.is_dir():
                raise
    return folder


def _stand_in(real: Path, header: str, answers: Mapping[str, str], helpers: str = "") -> Library:
    """Return the library that exports every symbol of the one at ``real``, under its symbol version."""
    exported = _SYMBOL.findall(_output(["nm", "-D", "--defined-only", str(real)]))
    version = next((version for _, version in exported if version), "")
    return Library(real.name, header, tuple(name for name, _ in exported), answers, helpers, version)


def read_prototypes(compiler: str, include: Path, header: str) -> dict[str, Prototype]:
    """Return the functions that ``header`` declares, by their names in the library."""
    text = _output([compiler, "-E", "-P", "-x", "c", f"-I{include}", str(include / header)])
    return {name: Prototype(result, parameters) for result, name, parameters in _PROTOTYPE.findall(text)}


def answering_source(library: Library, prototypes: Mapping[str, Prototype]) -> str:
    """Return the C source of the functions of ``library`` that answer, with its headers."""
    header = f"#include <{library.header}>" * bool(library.header)
    parts = [stub_answers.SHARED_STATE, header, counter_source(library), library.helpers]
    for name, body in library.answers.items():
        if name not in library.symbols or name not in prototypes:
            raise StubError(f"{library.file} or {library.header} has no {name}: mend tests/cuda/stub_answers.py")
        result, parameters = prototypes[name]
        parts.append(f"{result} {name}({parameters}) {{\n    COUNT({name});\n    {body.strip()}\n    return 0;\n}}")
    return "\n".join(parts) + "\n"


def silent_source(library: Library) -> str:
    """Return the C source of all other functions, without headers: arguments that are not read need no declaration."""
    names = [name for name in library.symbols if name not in library.answers]
    functions = [f"long {name}(void) {{ COUNT({name}); return 0; }}" for name in names]
    return "\n".join([counter_source(library, defines=False), *functions]) + "\n"


def counter_source(library: Library, defines: bool = True) -> str:
    """Return the C source of the counters of calls; one of the two sources ``defines`` them."""
    numbers = ", ".join(f"call_of_{name}" for name in library.symbols)
    count = "#define COUNT(name) __atomic_fetch_add(&fake_calls[call_of_##name], 1, __ATOMIC_RELAXED)"
    head = f"enum {{ {numbers}, functions }};\n{count}\n"
    hidden = '__attribute__((visibility("hidden")))'
    if not defines:
        return f"{head}extern {hidden} unsigned long fake_calls[functions];\n"
    names = ", ".join(f'"{name}"' for name in library.symbols)
    return f"""{head}{hidden} unsigned long fake_calls[functions];
static const char *const fake_names[] = {{ {names} }};
unsigned long fake_cuda_calls(const char *name) {{
    for (int number = 0; number < functions; number++)
        if (!strcmp(fake_names[number], name)) return fake_calls[number];
    return 0;
}}"""


def _compile(compiler: str, include: Path, library: Library, folder: Path) -> None:
    prototypes = stub_answers.CUBLAS_PROTOTYPES
    if library.header:
        prototypes = read_prototypes(compiler, include, library.header)
    sources = {"answers.c": answering_source(library, prototypes), "silent.c": silent_source(library)}
    for file, text in sources.items():
        (folder / file).write_text(text)
    options = [f"-Wl,-soname,{library.file}"]
    if library.symbol_version:
        script = folder / "version.map"
        script.write_text(f"{library.symbol_version} {{ global: *; }};\n")
        options.append(f"-Wl,--version-script={script}")
    _output([
        compiler, "-shared", "-fPIC", "-O1", "-w", "-Werror=implicit-function-declaration", f"-I{include}",
        *(str(folder / file) for file in sources), *options, "-o", str(folder / library.file), "-ldl",
    ])  # fmt: skip


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StubError(f"{' '.join(command[:4])} ... failed: {done.stderr.strip()[-800:]}")
    return done.stdout


def stub_environment(folder: Path) -> dict[str, str]:
    """Return the variables under which a program finds the stub in ``folder`` instead of CUDA."""
    paths = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    preloaded = " ".join(str(folder / name) for name in (RUNTIME, CUBLASLT, CUBLAS))
    return {"LD_PRELOAD": preloaded, "LD_LIBRARY_PATH": os.pathsep.join(paths)}


WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Functions of the runtime in which the host waits for the device."""


def count_calls(names: Iterable[str]) -> dict[str, int]:
    """Return how often this process has called the stub's functions ``names``."""
    library = ctypes.CDLL(RUNTIME)
    library.fake_cuda_calls.restype = ctypes.c_ulong
    return {name: int(library.fake_cuda_calls(name.encode())) for name in names}
